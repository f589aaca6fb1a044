"""Heads that draft in one pass, in the form that the C++ kernels read."""
