"""Bounds of settings, and default limits of HTTP requests and answers."""

MOST_PROCESSES = 10_000
"""Maximum processes of one kind (routers, verifiers, drafters) in an application."""
MOST_SECONDS = 1e7
"""Maximum of settings in seconds; larger values overflow a clock."""
MAX_BODY_BYTES = 4 * 2**20
MAX_ANSWER_BYTES = 32 * 2**20
