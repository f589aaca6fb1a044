"""Parts of the engine that use the C++ kernels of `kernels/cpu` instead of torch operations."""
