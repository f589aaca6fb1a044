"""LoRA adapters that an application serves."""
