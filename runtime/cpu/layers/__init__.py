"""Decoder layers, linear layers and whole verifiers on C++ kernels, with int8 weights and deterministic mode."""
