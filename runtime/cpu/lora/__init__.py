"""LoRA adapters for layers and matrix products that run on C++ kernels."""
