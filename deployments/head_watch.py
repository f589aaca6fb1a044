"""Notices that a process is gone that all of a Ray depends on, while calls of Ray wait for it for ever."""

import threading
from collections.abc import Callable, Sequence

from wingbeat.cluster.channels.doorbell import PeerProcess

POLL_S = 0.5


class HeadWatch:
    """Looks at these processes, on a thread of its own.

    Args:
        on_end: called once, on that thread, when one of them has ended.
    """

    def __init__(self, processes: Sequence[PeerProcess], on_end: Callable[[], None]) -> None:
        self._processes = processes
        self._on_end = on_end
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="wingbeat-head-watch", daemon=True).start()

    def close(self) -> None:
        """They may end from now on."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            if not all(process.alive() for process in self._processes) and not self._closed.is_set():
                self._on_end()
                return
