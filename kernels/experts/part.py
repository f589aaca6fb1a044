"""Hooks of mixtures of experts. Triton is imported when the kernel is first requested."""

kernels = {"grouped_product": "wingbeat.kernels.experts.triton"}
cases = "wingbeat.kernels.experts.comparison_case:CASES"
