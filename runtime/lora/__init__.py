"""LoRA adapters: files, and the adapters that an engine holds."""
