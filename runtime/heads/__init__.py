"""Weights and files of draft heads."""
