"""Kernels of GPUs, in Triton; each has its torch reference in the folder of what it computes."""
