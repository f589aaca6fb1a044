"""Whether a start fits the memory of this machine, said before anything is loaded."""
