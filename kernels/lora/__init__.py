"""Low-rank adapters on top of products (LoRA, arXiv 2106.09685)."""
