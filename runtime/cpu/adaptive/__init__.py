"""Adaptive speculation of rounds on C++ kernels."""
