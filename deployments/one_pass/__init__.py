"""One-pass heads in the application."""
