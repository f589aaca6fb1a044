"""Whether the replicas of an application can start: says what a start waits for, and which start is in vain."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from wingbeat.deployments.replica.refused_start import refusal

PLACEMENT_S = 600.0
"""For Ray to place every replica: a cluster that grows by itself may have to start a machine first."""
_UNPLACED = "to be scheduled"
"""What Serve says of a deployment whose replicas have no place yet, from 30 s on."""


class StartWatch:
    """Looks at the deployments while their replicas start.

    Args:
        say: shows one line.
        limit_s: for Ray to place a replica.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        limit_s: float = PLACEMENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._limit_s, self._clock = say, limit_s, clock
        self._unplaced_since: dict[str, float] = {}

    def look(self, deployments: Mapping[str, Any]) -> str | None:
        """Say what waits for a place since the last look.

        Args:
            deployments: by name, each with a `message` of Serve's.

        Returns:
            One line, where a replica has had no place for too long, or where another attempt would fail alike.
        """
        messages = {name: one.message or "" for name, one in deployments.items()}
        refused = next(filter(None, map(refusal, messages.values())), None)
        unplaced = {name: message for name, message in messages.items() if _UNPLACED in message}
        now = self._clock()
        self._unplaced_since = {name: self._unplaced_since.get(name, now) for name in unplaced}
        for name, message in unplaced.items():
            if self._unplaced_since[name] == now:
                self._say(f"waiting for Ray to place {name}: {_one_line(message)}")
            if now - self._unplaced_since[name] > self._limit_s:
                refused = refused or f"Ray has no place for {name} after {self._limit_s:.0f} s: {_one_line(message)}"
        return refused


def _one_line(message: str) -> str:
    return " ".join(message.split())
