"""`wingbeat bench`: compares speculative decoding with plain decoding."""
