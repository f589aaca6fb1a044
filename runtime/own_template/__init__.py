"""Chat templates that requests bring."""
