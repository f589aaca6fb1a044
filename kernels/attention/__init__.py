"""Attention over paged keys and values, with tree masks."""
