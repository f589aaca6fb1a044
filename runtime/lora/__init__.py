"""LoRA adapters: their files, and which of them an engine holds."""
