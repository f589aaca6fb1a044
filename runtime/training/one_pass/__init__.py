"""Training of one-pass heads."""
