"""A router that listens on a socket of the launcher itself, without Serve's proxy in front."""
