"""LoRA adapters of a verifier that is divided."""
