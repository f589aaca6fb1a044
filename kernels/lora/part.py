"""Hooks of the adapter kernel. Its modules are imported when first requested."""

kernels = {"add_adapters": "wingbeat.kernels.lora.adapters_triton"}
cases = "wingbeat.kernels.lora.comparison_case:CASES"
