"""The HTTP API of a router."""
