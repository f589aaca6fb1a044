"""Deterministic mode on GPUs: the bits of a row's result do not depend on the other rows in the same pass."""
