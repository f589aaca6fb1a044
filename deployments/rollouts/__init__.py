"""Weight updates of a running server, for sampling from a policy that is being trained."""
