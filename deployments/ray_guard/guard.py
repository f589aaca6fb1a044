"""Guards a Ray cluster that this process has started."""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.deployments.ray_guard.watchdog import Watchdog

HEAD = ("gcs_server", "raylet")
"""Ray's names of the processes of the head node that are not restarted when they end."""
POLL_S = 0.5


class HeadWatch:
    """Checks, on a separate thread, whether processes are alive, because Ray's calls would wait for an ended process
    forever.

    Args:
        on_end: called once, on that thread, when one of the processes has ended.
    """

    def __init__(self, processes: Sequence[PeerProcess], on_end: Callable[[], None]) -> None:
        self._processes = processes
        self._on_end = on_end
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="wingbeat-head-watch", daemon=True).start()

    def close(self) -> None:
        """Stops watching. If the processes end after this call, `on_end` is not called."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            if not all(process.alive() for process in self._processes) and not self._closed.is_set():
                self._on_end()
                return


class RayGuard:
    """Ends this process if a process of Ray's head ends, and all processes of the session once this process is gone.

    Args:
        session: folder of the Ray session.
        processes: Ray's processes of this node, by name.
    """

    def __init__(self, session: str, processes: Mapping[str, Sequence[Any]]) -> None:
        self._watchdog = Watchdog(Path(session))
        head = [info.process.pid for kind in HEAD for info in processes.get(kind, ())]
        self._head_watch = HeadWatch([PeerProcess(pid, process_start(pid)) for pid in head], _leave)

    @property
    def pid(self) -> int:
        """Id of the guard's own process, which must outlive the others."""
        return self._watchdog.pid

    def stand_down(self) -> None:
        """Stops watching the head; called before the cluster is ended."""
        self._head_watch.close()

    def close(self) -> None:
        """Ends the guard's process; must be called only when no processes of the session are left."""
        self._watchdog.close()


def _leave() -> None:
    # The watchdog is not ended here, because it ends orphaned children of the raylet once this process is gone.
    print("Error: a process of Ray's head has ended, so the application has stopped: start it again", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
