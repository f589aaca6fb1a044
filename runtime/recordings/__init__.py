"""Tokens and hidden states on disk."""
