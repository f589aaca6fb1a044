"""Engine figures among Ray's metrics."""
