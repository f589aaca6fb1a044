"""LoRA adapters of a verifier that an engine runs."""
