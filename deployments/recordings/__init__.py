"""Recordings of a verifier's hidden states: of a text by a command, and of live traffic."""
