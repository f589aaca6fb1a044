"""GPU kernels in Triton. The torch reference of each kernel is in the folder named after the kernel's operation."""
