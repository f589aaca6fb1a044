"""Detects that a draft head was made for another verifier."""
