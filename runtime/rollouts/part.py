"""Weights that change, for parts of the runtime that hold some of them."""

served_weights = "wingbeat.runtime.rollouts.served_weights:ServedWeights"
