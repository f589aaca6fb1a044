"""The CPU's round: C++ code checks, prunes, lays out and accepts trees, without padding."""
