"""The CPU's round: C++ checks, prunes, lays out and accepts trees, without padding."""
