"""Decoder layers as fused steps, in place of those that transformers wrote."""
