"""Draft trees of fixed, user-defined shape."""
