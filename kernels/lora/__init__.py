"""Low-rank adapters (LoRA, arXiv 2106.09685) added to matrix products."""
