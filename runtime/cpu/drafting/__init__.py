"""Passes of draft heads, each one call of C++."""
