"""`wingbeat build-engine`, and findings about engine directories."""
