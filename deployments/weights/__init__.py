"""Weights that operators push to a running server."""
