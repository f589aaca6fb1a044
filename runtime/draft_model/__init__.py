"""Small language models as drafters."""
