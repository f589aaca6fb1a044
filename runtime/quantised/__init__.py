"""Quantised checkpoints of a verifier, as the weights that their numbers stand for."""
