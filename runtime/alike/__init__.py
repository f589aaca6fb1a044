"""Deterministic mode on GPUs: a row's result has the same bits for any other rows in the same pass."""
