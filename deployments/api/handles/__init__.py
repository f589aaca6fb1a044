"""Calls of a router by other Serve deployments, over a handle."""
