"""Recurrences over the nodes of draft trees: short convolutions, gated delta rule, selective state spaces."""
