"""Blocks and the pool of keys and values."""
