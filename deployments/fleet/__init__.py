"""A router's side of the engines: connections, admission and routing."""
