"""Parts of an engine that run by the C++ of `kernels/cpu` in the place of torch's operations."""
