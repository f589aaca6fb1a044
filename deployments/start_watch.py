"""Watches the start of replicas: reports replicas that wait for placement, and detects starts that cannot succeed."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from wingbeat.deployments.replica.refused_start import refusal

PLACEMENT_S = 600.0
"""Maximum seconds until Ray has placed every replica. The limit is long because an autoscaling cluster may first have
to start a machine.
"""
_UNPLACED = "to be scheduled"
"""Words by which Serve's status message of a deployment shows that its replicas have not been placed within 30 s."""


class StartWatch:
    """Checks the deployments while their replicas start.

    Args:
        say: shows one line.
        limit_s: maximum seconds until Ray has placed a replica.
        clock: returns seconds.
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
        """Reports deployments that have begun to wait for placement since the last call; detects a start that cannot
        succeed.

        Args:
            deployments: Serve's status of each deployment by name, with a `message`.

        Returns:
            One line with the reason if a replica was not placed within `limit_s`, or has refused to start and would
                refuse again; else
            None.
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
