"""Runtime part: LoRA adapters on C++ kernels."""

adapt_layer = "wingbeat.runtime.cpu.lora.adapted_stack:adapt_layer"
adapt_product = "wingbeat.runtime.cpu.lora.adapted_stack:adapt_product"
