"""The kernel of the gated delta rule; imports what it adds where it is asked for."""

kernels = {"delta_rule": "wingbeat.kernels.state.triton"}
cases = "wingbeat.kernels.state.comparison_case:CASES"
