"""CUDA graphs of anything."""
