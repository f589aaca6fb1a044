"""Saved prefixes, such as system prompts."""
