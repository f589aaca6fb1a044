"""Attention over a paged KV cache, with tree masks."""
