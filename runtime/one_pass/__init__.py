"""Heads that draft a block of tokens in one pass: their families, files and mathematics."""
