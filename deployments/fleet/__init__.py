"""Engines as a router sees them."""
