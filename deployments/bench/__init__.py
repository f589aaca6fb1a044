"""The command that compares speculative with plain decoding."""
