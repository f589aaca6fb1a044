"""Weights that are pushed to a server that runs."""
