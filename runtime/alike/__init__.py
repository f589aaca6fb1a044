"""Deterministic mode on GPUs: a row's result is bit-identical whatever other rows share its pass."""
