"""Group-quantized weights packed for GPUs, and matrix products with them."""
