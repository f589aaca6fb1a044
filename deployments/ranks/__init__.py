"""Tensor-parallel ranks of a verifier."""
