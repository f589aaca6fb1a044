"""A verifier that is divided among several processes."""
