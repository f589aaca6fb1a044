"""Mixtures of experts on GPUs, in few launches."""
