"""Other Serve deployments that call a router by a handle."""
