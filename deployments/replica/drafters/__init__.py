"""Actors and processes of drafters, and their supervisors."""
