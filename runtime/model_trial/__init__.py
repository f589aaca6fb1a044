"""Test at start: a loaded model's logits are compared with those of transformers."""
