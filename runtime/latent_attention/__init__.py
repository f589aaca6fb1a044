"""Attention over keys and values that are made of a latent (MLA), as fused steps."""
