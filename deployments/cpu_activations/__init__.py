"""Setting for rounding activations on CPUs."""
