"""Saved prefixes: beginnings of prompts that an engine computes once, pins in its KV cache and stores on disk."""
