"""Layers with sliding windows keep KV of the positions that their windows reach, instead of whole contexts."""
