"""The engine's own process, and the messages between it and the replica."""
