"""Drafting by suffix automata over earlier text."""
