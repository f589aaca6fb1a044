"""LoRA adapters: their files, and the adapters that are loaded in an engine."""
