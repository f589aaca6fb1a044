"""Bounds of settings, and default limits of HTTP requests and answers."""

MOST_PROCESSES = 10_000
"""Maximum number of processes of one kind (routers, verifiers or drafters) in an application."""
MOST_SECONDS = 1e7
"""Maximum value of settings that are in seconds; larger values would overflow a clock."""
MAX_BODY_BYTES = 4 * 2**20
MAX_ANSWER_BYTES = 32 * 2**20
