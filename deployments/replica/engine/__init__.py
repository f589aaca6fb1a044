"""The engine's own process, and the messages between it and its replica."""
