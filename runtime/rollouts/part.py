"""Hook for parts of the runtime that hold weights which can be updated."""

served_weights = "wingbeat.runtime.rollouts.served_weights:ServedWeights"
