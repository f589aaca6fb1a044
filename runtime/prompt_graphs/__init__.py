"""CUDA graphs of a verifier's rounds with prompt chunks."""
