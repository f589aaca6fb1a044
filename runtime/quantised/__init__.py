"""Reads quantised checkpoints of verifiers and draft heads."""
