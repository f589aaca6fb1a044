"""LoRA adapters on top of what the C++ of CPUs computes."""
