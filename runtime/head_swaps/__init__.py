"""Swaps of draft heads between two rounds."""
