"""Recordings of a verifier's hidden states, made from a text (by a command) or from live traffic."""
