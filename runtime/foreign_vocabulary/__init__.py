"""Drafting by a model with another vocabulary than the verifier's."""
