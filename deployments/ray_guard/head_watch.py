"""Detects that a process of Ray's head node has ended. Without this check, Ray's calls would wait for the process
forever.
"""

import threading
from collections.abc import Callable, Sequence

from wingbeat.cluster.channels.doorbell import PeerProcess

POLL_S = 0.5


class HeadWatch:
    """Checks, on a separate thread, whether processes are alive.

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
