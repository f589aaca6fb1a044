"""Limits of what an operator may set, and of what a request may ask for where nothing is set; HTTP shares them."""

MOST_PROCESSES = 10_000
"""Of one kind in an application."""
MOST_SECONDS = 1e7
"""What waits may be set to: more overflows a clock."""
MAX_BODY_BYTES = 4 * 2**20
MAX_ANSWER_BYTES = 32 * 2**20
