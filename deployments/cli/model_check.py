"""A process that checks the checkpoints while Ray starts.

It imports torch and transformers, which takes seconds and hundreds of megabytes that the command itself need not have.
"""

import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Self

from wingbeat.cluster.child_process import ChildProcess, die_with_parent
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli.preflight import PreflightError

MODULE = "wingbeat.deployments.cli.model_check"


class ModelCheck:
    """`checkpoint_checks.check_models` in a process of its own, which begins at once and ends with this context."""

    def __init__(self, config: AppConfig, here: bool) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = ChildProcess(MODULE, (theirs.fileno(),))
        self._connection = Connection(ours.detach())
        self._connection.send((config, here))

    def wait(self) -> None:
        """Return once everything is found to be right.

        Raises:
            PreflightError: one line that names the setting, the file or the tensor.
        """
        try:
            problem = self._connection.recv()
        except (EOFError, ConnectionError):
            problem = "the process that checks the checkpoints was ended; is there enough memory?"
        if problem is not None:
            raise PreflightError(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._connection.close()


def main() -> None:
    """Check what the parent asks for, and tell it the problem or None."""
    fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    from wingbeat.deployments.cli.checkpoint_checks import check_models

    # Of a terminal's Ctrl-C the process that asks decides, which gets it too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(fd) as connection:
        config, here = connection.recv()
        problem = None
        try:
            check_models(config, here)
        except (ValueError, OSError) as error:
            problem = str(error)
        connection.send(problem)


if __name__ == "__main__":
    main()
