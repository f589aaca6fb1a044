"""Capture and replay of CUDA graphs."""
