"""A server whose weights change while it runs, for whoever samples what a policy in training writes."""
