"""The kernel of adapters; imports what it adds where it is asked for."""

kernels = {"add_adapters": "wingbeat.kernels.lora.adapters_triton"}
cases = "wingbeat.kernels.lora.comparison_case:CASES"
