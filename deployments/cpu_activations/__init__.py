"""Setting of activations that are rounded on CPUs."""
