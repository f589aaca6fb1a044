"""The channel between two nodes, over one TCP connection."""
