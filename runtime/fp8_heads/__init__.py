"""EAGLE heads with FP8 weights."""
