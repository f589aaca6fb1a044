"""Saved prefixes: beginnings of prompts that an engine computes once, pins in its KV and keeps on disk."""
