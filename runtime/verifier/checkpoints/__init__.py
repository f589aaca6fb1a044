"""Checkpoints as they lie on disk: their tensors, and their configurations."""
