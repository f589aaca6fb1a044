"""Hooks of the packed-weight kernel. Its modules are imported when first requested."""

kernels = {"packed_product": "wingbeat.kernels.packed.triton"}
cases = "wingbeat.kernels.packed.comparison_case:CASES"
