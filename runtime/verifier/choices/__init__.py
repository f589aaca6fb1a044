"""From logits to tokens: processors, draws, log-probabilities, and which path of a tree is accepted."""
