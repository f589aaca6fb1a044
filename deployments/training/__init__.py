"""Training of draft heads."""
