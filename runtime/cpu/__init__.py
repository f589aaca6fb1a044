"""What runs on CPUs by the C++ of `kernels/cpu` in the place of torch's operations."""
