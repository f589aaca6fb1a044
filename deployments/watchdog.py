"""Process that ends the processes of a launcher's Ray if the launcher was killed and could not end them itself.

    python -m wingbeat.deployments.watchdog FOLDER

The kernel kills Ray's head together with the launcher, and most workers then exit. But Ray's agents try to reach the
head for another minute, and a stopped process (SIGSTOP) does not exit at all: it would hold the port or a GPU.
"""

import signal
import subprocess
import sys
from pathlib import Path

from wingbeat.cluster.channels.segment_files import remove_stale_segments
from wingbeat.cluster.process_tree import end, writers
from wingbeat.runtime.interpreter import module_command, module_environment

MOST_ROUNDS = 10
"""Rounds of looking for remaining processes; a process that was being started in one round is found in the next."""


class Watchdog:
    """Handle of the watchdog process, which ends shortly after this process, however this process ends.

    Args:
        folder: folder of the Ray session, in which each of Ray's processes writes its log.
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
        """Process id of the watchdog."""
        return self._process.pid

    def close(self) -> None:
        """Ends the watchdog, because no processes are left to end."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


def main() -> None:
    """Waits for the launcher's end, which closes the pipe on standard input, then ends the session's processes."""
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
