"""Storing and moving keys and values."""
