"""Routes beside those that generate."""
