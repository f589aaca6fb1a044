"""GPU kernels in Triton; the torch reference of each is in the folder named after its operation."""
