"""Training of drafters and of small verifiers."""
