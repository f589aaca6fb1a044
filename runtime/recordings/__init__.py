"""Recordings: token ids and hidden states of verified sequences on disk."""
