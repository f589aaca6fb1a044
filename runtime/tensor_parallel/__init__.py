"""One verifier over several processes: each rank holds a part of every weight, and runs what rank 0 runs."""
