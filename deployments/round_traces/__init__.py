"""Traces of the rounds of all engines."""
