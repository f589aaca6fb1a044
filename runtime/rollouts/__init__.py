"""Weights of a verifier that change while it is served."""
