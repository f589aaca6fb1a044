"""Options of vLLM in the place of settings."""
