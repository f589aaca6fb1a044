"""Hooks of the recurrences' kernels. Its modules are imported when first requested."""

kernels = dict.fromkeys(
    ("delta_rule", "selective_scan", "convolve", "advance_recurrence"), "wingbeat.kernels.state.triton"
) | {"channel_scan": "wingbeat.kernels.state.triton_channels"}
cases = "wingbeat.kernels.state.comparison_case:CASES"
