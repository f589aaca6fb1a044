"""Mixtures of experts on GPUs for which torch has no grouped product."""
