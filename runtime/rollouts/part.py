"""Hook of the runtime part that updates the weights of served verifiers."""

served_weights = "wingbeat.runtime.rollouts.served_weights:ServedWeights"
