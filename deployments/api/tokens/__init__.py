"""Tokens of texts and texts of tokens, without generating any."""
