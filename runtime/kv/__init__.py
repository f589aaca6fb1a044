"""KV blocks and the KV pool."""
