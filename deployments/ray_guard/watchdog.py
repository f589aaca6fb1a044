"""Process that ends the processes of a launcher's Ray cluster if the launcher was killed and could not end them itself.

    python -m wingbeat.deployments.ray_guard.watchdog FOLDER

When the launcher is killed, the kernel also kills Ray's head, and most workers then exit by themselves. But Ray's
agents try to reach the head for another minute, and a process that is stopped (SIGSTOP) does not exit at all and would
keep a port or a GPU occupied.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.channels.segment_files import remove_stale_segments
from wingbeat.cluster.process_tree import end
from wingbeat.runtime.interpreter import module_command, module_environment

RAYS_PROGRAMS = frozenset({"gcs_server", "raylet"})
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


def writers(folder: Path) -> list[PeerProcess]:
    """Python processes of this environment, and Ray's programs, that have a file below `folder` open for writing.

    Other programs are not included, such as a pager or an editor in which a user has opened a log.
    """
    ours = Path(sys.executable).resolve()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            program = (path / "exe").readlink()
            if (program == ours or program.name in RAYS_PROGRAMS) and _writes_below(path, folder):
                found.append(PeerProcess(int(path.name), process_start(int(path.name))))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # the process ended meanwhile, or is another user's
    return [process for process in found if process.pid != os.getpid()]


def _writes_below(process: Path, folder: Path) -> bool:
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process has closed the file meanwhile
            if not fd.readlink().is_relative_to(folder):
                continue
            lines = (process / "fdinfo" / fd.name).read_text().splitlines()
            flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
            if flags & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False


if __name__ == "__main__":
    main()
