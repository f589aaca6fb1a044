"""Calls that other Serve deployments make to a router by a handle."""
