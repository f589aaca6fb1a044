"""Chat templates sent with requests."""
