"""Recordings of a verifier's hidden states, made over a text by a command, or from live traffic."""
