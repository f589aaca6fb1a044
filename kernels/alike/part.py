"""Hooks of the batch-invariant matrix products. Triton is imported when a kernel is first requested."""

kernels = {"alike_product": "wingbeat.kernels.alike.triton"}
cases = "wingbeat.kernels.alike.comparison_case:CASES"
