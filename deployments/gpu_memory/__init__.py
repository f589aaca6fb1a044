"""A verifier and its drafter on one GPU: the channel and lent weights in GPU memory."""
