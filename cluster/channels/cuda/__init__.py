"""The channel through CUDA memory that two processes of a node map; also lending of weights between such processes."""
