"""Requests, sequences, and the scheduler that selects which sequences run."""
