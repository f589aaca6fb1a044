"""Recordings of what the rounds of all engines do."""
