"""LoRA adapters of a verifier divided among ranks."""
