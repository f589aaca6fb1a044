"""Layers, linear layers and whole verifiers by the C++ of CPUs, and what only they can do: int8, alike rows."""
