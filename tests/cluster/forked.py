"""Functions that the tests' fork server runs: report their process and follow commands."""

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

IMPORTED_BY = os.getpid()


def answer(connection: Connection) -> None:
    """Send the ids of the process that imported this module and of this one, then wait."""
    connection.send((IMPORTED_BY, os.getpid()))
    if connection.recv() == "fail":
        raise ValueError("as it was told")


def rest(connection: Connection) -> None:
    """As `answer`; on SIGTERM, the process first creates the file at the received path."""
    path = Path(connection.recv())

    def end(number: int, frame: object) -> None:
        path.touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    connection.send(os.getpid())
    signal.pause()
