"""The steps of a round: batch rows, forward passes, the choice of tokens, and rounds in flight."""
