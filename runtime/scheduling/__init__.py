"""Requests, sequences, and the scheduler that selects the sequences that run."""
