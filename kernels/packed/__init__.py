"""Weights of few bits as GPUs read them, and products by them."""
