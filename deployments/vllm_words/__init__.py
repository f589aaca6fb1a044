"""Options of vLLM that can be given in place of settings."""
