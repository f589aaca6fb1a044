"""Engine parts that run on the C++ kernels of `kernels/cpu` instead of torch operations."""
