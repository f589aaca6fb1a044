"""Checkpoints as they lie on disk: their tensors, their configurations, and what quantised ones hold."""
