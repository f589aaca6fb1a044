"""Multi-token-prediction modules of a verifier's own checkpoint: names, weights, drafting."""
