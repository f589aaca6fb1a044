"""Multi-token-prediction (MTP) modules in a verifier's own checkpoint: tensor names, weights, drafting."""
