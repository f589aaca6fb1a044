"""Embeddings: prompts' hidden states, pooled during prefill."""
