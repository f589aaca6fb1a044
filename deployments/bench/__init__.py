"""`wingbeat bench`: compares speculative with plain decoding."""
