"""Findings of `wingbeat inspect` about one-pass heads."""
