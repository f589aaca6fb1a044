"""What ends the processes of a launcher's Ray where the launcher was killed and could not end them itself.

    python -m wingbeat.deployments.watchdog FOLDER

The kernel kills Ray's head with the launcher, and most workers notice that; its agents try to reach the head for a
minute more, and a process that is stopped notices nothing: it would keep the port or a GPU.
"""

import signal
import subprocess
import sys
from pathlib import Path

from wingbeat.cluster.channels.segment_files import remove_stale_segments
from wingbeat.cluster.process_tree import end, writers
from wingbeat.runtime.interpreter import module_command, module_environment

MOST_ROUNDS = 10
"""What was being started at the launcher's death is found by the next one."""


class Watchdog:
    """A process that outlives this one for a moment, whatever ends it.

    Args:
        folder: of a Ray session, where each of its processes writes its log.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            module_command(__name__, folder.resolve()),
            stdin=subprocess.PIPE,
            env=module_environment(),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self) -> None:
        """There is nothing left to watch for."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


def main() -> None:
    """Wait for the launcher's end, which closes the pipe to it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(MOST_ROUNDS):
        if not (left := writers(Path(sys.argv[1]))):
            break
        end(left, 0.0)
    remove_stale_segments()


if __name__ == "__main__":
    main()
