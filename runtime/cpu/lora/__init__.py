"""LoRA adapters for layers and products that run on C++ kernels."""
