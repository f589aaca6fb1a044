"""Drafters of a user's own."""
