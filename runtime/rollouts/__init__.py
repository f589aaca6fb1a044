"""Updates of a served verifier's weights, for reinforcement learning."""
