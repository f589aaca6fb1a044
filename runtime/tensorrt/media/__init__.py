"""Vision encoders of engine directories."""
