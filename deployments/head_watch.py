"""Detects that a process of Ray's head has ended, for which Ray's own calls would wait forever."""

import threading
from collections.abc import Callable, Sequence

from wingbeat.cluster.channels.doorbell import PeerProcess

POLL_S = 0.5


class HeadWatch:
    """Polls processes on a thread of its own.

    Args:
        on_end: called once, on that thread, when one of the processes has ended.
    """

    def __init__(self, processes: Sequence[PeerProcess], on_end: Callable[[], None]) -> None:
        self._processes = processes
        self._on_end = on_end
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="wingbeat-head-watch", daemon=True).start()

    def close(self) -> None:
        """Stops watching; the processes may end from now on."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            if not all(process.alive() for process in self._processes) and not self._closed.is_set():
                self._on_end()
                return
