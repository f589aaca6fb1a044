"""Loads a folder into a model that the runner can run."""
