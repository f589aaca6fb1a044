"""Products by packed weights on GPUs; imports what it adds where it is asked for."""

kernels = {"packed_product": "wingbeat.kernels.packed.triton"}
cases = "wingbeat.kernels.packed.comparison_case:CASES"
