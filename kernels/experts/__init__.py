"""Mixtures of experts: choice of experts, and matrix products of rows with the weights of their experts."""
