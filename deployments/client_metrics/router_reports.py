"""Reports of all routers, which each engine stores so that any router can read them."""

import time
from collections.abc import Callable
from typing import Any

RECENT_S = 15.0
"""Seconds without a report after which figures of a router's current state are no longer shown."""
GONE_S = 600.0
"""Seconds without a report after which a router counts as gone, so that only its sums are kept."""


class RouterReports:
    """Newest report of each router, and the sums of routers that are gone.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, dict[str, Any]]] = {}
        self._gone: dict[str, Any] | None = None

    def exchange(self, report: dict[str, Any] | None) -> dict[str, Any]:
        """Stores a calling router's report, if there is one; returns the figures that all routers have reported."""
        if report is not None:
            self.add(report)
        return {"clients": self.clients(), "routers": self.routers()}

    def add(self, report: dict[str, Any]) -> None:
        """Stores a report, unless a newer report of the same router is already stored."""
        now, router_id = self._clock(), report["router_id"]
        _, known = self._reports.get(router_id, (0.0, {"number": 0}))
        if report["number"] > known["number"]:
            self._reports[router_id] = (now, report)
        for other, (heard_at, old) in list(self._reports.items()):
            if now - heard_at > GONE_S:
                self._gone = summed(self._gone, old["clients"])
                del self._reports[other]

    def clients(self) -> dict[str, Any] | None:
        """Returns the client figures of this engine summed over all routers; None before the first report."""
        total = self._gone
        for _, report in self._reports.values():
            total = summed(total, report["clients"])
        return total

    def routers(self) -> dict[str, dict[str, Any]]:
        """Returns, for each router with a recent report, the figures of the report and the report's number."""
        now = self._clock()
        return {
            router_id: {**report["router"], "number": report["number"]}
            for router_id, (heard_at, report) in self._reports.items()
            if now - heard_at <= RECENT_S
        }


def summed(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the sum of two `ClientFigures`, given as plain data; either argument may be None."""
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
