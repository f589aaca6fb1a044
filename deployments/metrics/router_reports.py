"""What the routers of an application told one engine of themselves: kept there, so that every router can show it."""

import time
from collections.abc import Callable
from typing import Any

RECENT_S = 15.0
"""A router that was silent for longer shows no present state."""
GONE_S = 600.0
"""One that was silent for longer will not come back: its sums are all that is kept."""


class RouterReports:
    """Newest report by router; nothing of what routers that are gone have counted is lost.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, dict[str, Any]]] = {}
        self._gone: dict[str, Any] | None = None

    def add(self, report: dict[str, Any]) -> None:
        """Take a report; one older than what is there changes nothing."""
        now, router_id = self._clock(), report["router_id"]
        _, known = self._reports.get(router_id, (0.0, {"number": 0}))
        if report["number"] > known["number"]:
            self._reports[router_id] = (now, report)
        for other, (heard_at, old) in list(self._reports.items()):
            if now - heard_at > GONE_S:
                self._gone = summed(self._gone, old["clients"])
                del self._reports[other]

    def clients(self) -> dict[str, Any] | None:
        """What clients of this engine saw, over all routers; None before the first one."""
        total = self._gone
        for _, report in self._reports.values():
            total = summed(total, report["clients"])
        return total

    def routers(self) -> dict[str, dict[str, Any]]:
        """Routers heard of lately: their own figures, and the number of the report they are from."""
        now = self._clock()
        return {
            router_id: {**report["router"], "number": report["number"]}
            for router_id, (heard_at, report) in self._reports.items()
            if now - heard_at <= RECENT_S
        }


def summed(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    """`ClientFigures` as plain data, or None, added up."""
    if one is None or other is None:
        return one or other
    counted = {name: _sum(value, other[name]) for name, value in one.items()}
    return counted | {"max_model_len": one["max_model_len"]}


def _sum(one: Any, other: Any) -> Any:
    if not isinstance(one, dict):
        return one + other
    if "bounds" in one:
        counts = [mine + more for mine, more in zip(one["counts"], other["counts"], strict=True)]
        return {"bounds": one["bounds"], "counts": counts, "total": one["total"] + other["total"]}
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *(other.keys() - one.keys()))}
