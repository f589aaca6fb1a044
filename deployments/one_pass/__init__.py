"""Application's part of one-pass heads."""
