"""Drafting with small language models."""
