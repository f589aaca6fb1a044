"""Captures: what a verifier saw and predicted, on disk, for drafters to learn from; the format is docs/capture.md's."""
