"""Rounds on a CPU: C++ code checks, prunes, lays out and accepts trees, without padding."""
