"""Grammars that answers must match."""
