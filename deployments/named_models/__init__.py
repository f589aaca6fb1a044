"""`wingbeat fetch`, which downloads published models by short names."""
