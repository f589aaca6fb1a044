"""Check of this machine's memory before a start."""
