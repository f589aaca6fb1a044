"""Hooks of the product of few rows. Its kernel is one of `kernels.gpu`."""

cases = "wingbeat.kernels.few_rows.comparison_case:CASES"
