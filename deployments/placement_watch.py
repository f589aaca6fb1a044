"""Whether Ray places the replicas of an application: says what a start waits for, and ends one that waits in vain."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

PLACEMENT_S = 600.0
"""For Ray to place every replica: a cluster that grows by itself may have to start a machine first."""
POLL_S = 1.0
END_S = 5.0
"""For a look that is under way."""
_UNPLACED = "to be scheduled"
"""What Serve says of a deployment whose replicas have no place yet, from 30 s on."""


class PlacementWatch:
    """A thread that looks at the deployments while their replicas start; runs from the start of the block to its end.

    Args:
        deployments: by name, each with a `message` of Serve's.
        say: shows one line.
        give_up: ends the start, once `problem` says why.
    """

    def __init__(
        self,
        deployments: Callable[[], Mapping[str, Any]],
        say: Callable[[str], None],
        give_up: Callable[[], None],
        limit_s: float = PLACEMENT_S,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem: str | None = None
        """One line, where a replica has had no place for the whole limit."""
        self._deployments, self._say, self._give_up = deployments, say, give_up
        self._limit_s, self._poll_s, self._clock = limit_s, poll_s, clock
        self._unplaced_since: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="placement-watch", daemon=True)

    def __enter__(self) -> "PlacementWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)

    def look(self) -> None:
        """Say what waits for a place since the last look; give up where a wait has lasted too long."""
        unplaced = {name: one.message for name, one in self._deployments().items() if _UNPLACED in (one.message or "")}
        now = self._clock()
        for name in self._unplaced_since.keys() - unplaced.keys():
            del self._unplaced_since[name]
        for name, message in unplaced.items():
            if name not in self._unplaced_since:
                self._unplaced_since[name] = now
                self._say(f"waiting for Ray to place {name}: {_one_line(message)}")
            if now - self._unplaced_since[name] > self._limit_s:
                self.problem = f"Ray has found no place for {name} within {self._limit_s:.0f} s: {_one_line(message)}"
                self._give_up()
                return

    def _watch(self) -> None:
        while self.problem is None and not self._ended.wait(self._poll_s):
            self.look()


def _one_line(message: str) -> str:
    return " ".join(message.split())
