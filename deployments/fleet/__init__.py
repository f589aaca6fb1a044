"""A router's side of the communication with engines: connections, admission and routing."""
