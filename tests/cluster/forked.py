"""What the tests' fork server runs: says who it is, and does as it is told."""

import os
from multiprocessing.connection import Connection

IMPORTED_BY = os.getpid()


def answer(connection: Connection) -> None:
    """Send the ids of the process that imported this module and of this one, then wait."""
    connection.send((IMPORTED_BY, os.getpid()))
    if connection.recv() == "fail":
        raise ValueError("as it was told")
