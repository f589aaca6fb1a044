"""Checks before a start: arguments, address, settings, files, and the room in a Ray cluster."""
