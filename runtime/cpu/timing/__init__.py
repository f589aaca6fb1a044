"""Choice of dtype and number of threads of a verifier on a CPU, by timing its rounds at start."""
