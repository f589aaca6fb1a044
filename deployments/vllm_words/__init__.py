"""Translation of vLLM's options, which can be given instead of settings."""
