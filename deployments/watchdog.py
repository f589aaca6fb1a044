"""Process that ends the processes of a launcher's Ray cluster if the launcher was killed and could not end them itself.

    python -m wingbeat.deployments.watchdog FOLDER

When the launcher is killed, the kernel also kills Ray's head, and most workers then exit by themselves. But Ray's
agents try to reach the head for another minute, and a process that is stopped (SIGSTOP) does not exit at all and would
keep a port or a GPU occupied.
"""

import signal
import subprocess
import sys
from pathlib import Path

from wingbeat.cluster.channels.segment_files import remove_stale_segments
from wingbeat.cluster.process_tree import end, writers
from wingbeat.runtime.interpreter import module_command, module_environment

MOST_ROUNDS = 10
"""Maximum rounds of looking for remaining processes. Several rounds are needed, because a process that is being started
during one round is found only in the next round.
"""


class Watchdog:
    """Handle of the watchdog process. The watchdog ends shortly after this process has ended, for whatever reason.

    Args:
        folder: folder of the Ray session. Processes that have a log file open in this folder belong to the session.
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
        """Ends the watchdog; must be called only when no processes of the session are left."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


def main() -> None:
    """Waits until the launcher has ended, which closes the pipe on standard input; then ends the processes of the
    session.
    """
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
