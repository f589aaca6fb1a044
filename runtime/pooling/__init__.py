"""Embeddings: hidden states of prompts, pooled while these are computed."""
