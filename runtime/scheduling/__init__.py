"""Requests, sequences, and which of them run."""
