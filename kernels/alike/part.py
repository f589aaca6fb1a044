"""Products of which each row has the same bits in any batch, on GPUs; imports Triton where one is asked for."""

kernels = {"alike_product": "wingbeat.kernels.alike.triton"}
cases = "wingbeat.kernels.alike.comparison_case:CASES"
