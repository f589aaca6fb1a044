"""Recorded traces of one engine's rounds."""

import itertools
import math
import time
from collections import deque
from typing import Any, NamedTuple

from wingbeat.runtime.engine.clocks import RoundClock
from wingbeat.runtime.protocol.messages import DrafterFigures
from wingbeat.runtime.round.flight import RoundInFlight, RoundResult

MOST_IDS = 32
"""Maximum number of request ids in a trace event."""
MAX_EVENTS = 200_000
"""Maximum number of events of one trace, enough for some minutes of rounds; later events are dropped."""


class TraceEvent(NamedTuple):
    """An interval of a trace."""

    name: str
    start_s: float
    """Unix time in seconds, so that traces of several engines share one time axis."""
    seconds: float
    details: dict[str, Any] | None = None
    row: str = "phases"
    """Trace row of the interval: `phases` (host), `rounds`, or `drafter`."""


class RoundTrace:
    """Trace of rounds, written by a `RoundClock` in its thread.

    Args:
        seconds: duration of the trace; later events are dropped, so that a trace stays small even if no router stops
            it.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.events: list[TraceEvent] = []
        self.until_s = time.time() + seconds
        self._epoch_s = time.time() - time.perf_counter()
        self._begun: list[float] = []
        self._launched: deque[tuple[RoundInFlight, float]] = deque()

    def begin(self, now: float) -> None:
        """Begins a phase; a phase that begins within this phase must end before this phase ends."""
        self._begun.append(now)

    def end(self, name: str, now: float) -> None:
        """Ends the phase that began last and adds its event. If the phase began before the trace, no event is added."""
        if self._begun:
            begun = self._begun.pop()
            self._add(TraceEvent(name, self._epoch_s + begun, now - begun))

    def launched(self, flight: RoundInFlight) -> None:
        """Stores a round's launch time."""
        self._launched.append((flight, time.perf_counter()))

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Adds the event of the settled round; if the round was launched before the trace began, no event is added."""
        if not self._launched or self._launched[0][0] is not flight:
            return
        _, launched = self._launched.popleft()
        details = {
            "decodes": len(flight.plan.decodes),
            "prompt_tokens": sum(chunk.length for chunk in flight.plan.chunks),
            "tree_nodes": sum(result.num_valid) - len(result.num_valid),
            "tokens": sum(map(len, result.token_ids)) + sum(map(len, result.chunk_token_ids)),
            "forward_ms": round(1e3 * flight.times.forward_s, 3),
            "requests": flight.plan.request_ids()[:MOST_IDS],
        }
        self._add(TraceEvent("round", self._epoch_s + launched, time.perf_counter() - launched, details, "rounds"))

    def drafted(self, figures: DrafterFigures, request_ids: list[str]) -> None:
        """Adds the drafter's stages, timed by the drafter's clock; `request_ids` are the requests that got trees."""
        begun, details = figures.started_ns, {"requests": request_ids[:MOST_IDS]}
        for name in ("commit", "levels", "reply"):
            micros = getattr(figures, f"{name}_us")
            if micros:
                self._add(TraceEvent(name, begun / 1e9, micros / 1e6, details, "drafter"))
            begun += 1000 * micros

    def abandoned(self) -> None:
        """Drops the launch times of the rounds in flight, which will never be settled."""
        self._launched.clear()

    def _add(self, event: TraceEvent) -> None:
        if len(self.events) < MAX_EVENTS and event.start_s < self.until_s:
            self.events.append(event)


class Traces:
    """Starts and stops the traces of an engine, between two rounds."""

    def __init__(self, clock: RoundClock) -> None:
        self._clock = clock
        self._open: dict[int, RoundTrace] = {}
        self._numbers = itertools.count()

    def start(self, seconds: float) -> int:
        """Begins a trace of at most `seconds` seconds; returns the trace's number. Older traces that were not stopped
        in time are ended.
        """
        for number in [number for number, trace in self._open.items() if trace.until_s < time.time()]:
            self.stop(number)
        number = next(self._numbers)
        self._open[number] = RoundTrace(seconds)
        self._clock.traces.append(self._open[number])
        return number

    def stop(self, number: int) -> list[tuple]:
        """Ends a trace; returns its `TraceEvent`s as tuples."""
        trace = self._open.pop(number)
        self._clock.traces.remove(trace)
        return list(map(tuple, trace.events))
