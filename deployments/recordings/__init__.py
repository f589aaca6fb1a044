"""Recordings of a verifier's hidden states, over a text by a command or from live traffic."""
