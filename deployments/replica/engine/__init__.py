"""The engine's own process, and its messages to and from the replica."""
