"""Hooks of the gated delta rule's kernel. Its modules are imported when first requested."""

kernels = {"delta_rule": "wingbeat.kernels.state.triton"}
cases = "wingbeat.kernels.state.comparison_case:CASES"
