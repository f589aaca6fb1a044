"""Decoder layers, linear layers and whole verifiers on C++ kernels; also int8 weights and deterministic mode."""
