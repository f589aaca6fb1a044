"""Verifiers on GPUs of which each row has the same bits whatever shares its pass."""
