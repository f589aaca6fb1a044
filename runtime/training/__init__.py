"""Training of drafters and small verifiers."""
