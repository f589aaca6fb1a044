"""Drafting by prompt lookup."""
