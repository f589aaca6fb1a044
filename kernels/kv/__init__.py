"""Stores and moves keys and values in a paged KV cache."""
