"""Embeddings: the hidden states of a prompt, pooled during prefill."""
