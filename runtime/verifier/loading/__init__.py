"""Loads a folder into a model and verifies its logits against transformers."""
