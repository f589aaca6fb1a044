"""Group-quantized weights packed for GPUs, and products by them."""
