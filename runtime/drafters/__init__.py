"""Ways of drafting."""
