"""Adaptive speculation for rounds that run on C++ kernels."""
