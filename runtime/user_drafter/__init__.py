"""Drafters written by users."""
