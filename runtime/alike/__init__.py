"""Deterministic mode on GPUs: a row has the same bits whatever shares its pass."""
