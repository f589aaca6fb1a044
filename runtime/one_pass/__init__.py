"""Heads that draft a block of tokens in one pass: families, checkpoint files, forward passes and drafters."""
