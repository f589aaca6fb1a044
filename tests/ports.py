"""Ports for servers of tests."""

import random
import socket

RANGE = range(20000, 32000)
"""Below those that the kernel gives to connections, one of which may take a port between its choice and its use."""


def free_port() -> int:
    """A port of this machine at which no process listens."""
    while True:
        number = random.choice(RANGE)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", number)) != 0:
                return number
