"""The channel between two processes with one GPU, over CUDA memory that both map; weights lent likewise."""
