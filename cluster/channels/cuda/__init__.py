"""The channel between two processes on one GPU, in CUDA memory that both map; also lending of weights."""
