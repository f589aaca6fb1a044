"""`GET /load`: the running requests of a router."""
