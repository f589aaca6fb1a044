"""Recurrences whose tokens are the nodes of trees: short convolutions, gated delta rules, selective state spaces."""
