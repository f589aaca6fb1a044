"""Multi-token-prediction (MTP) modules that a verifier's checkpoint contains: tensor names, weights, drafting."""
