"""The channel through CUDA memory that two processes of a node map, and lending of weights between such processes."""
