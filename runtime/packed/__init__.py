"""Quantised weights that stay packed on GPUs."""
