"""A verifier and its drafter on one GPU: rounds and weights that both have in its memory."""
