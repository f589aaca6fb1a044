"""A recording of an engine's rounds: when each phase began and how long it took."""

import time
from collections import deque
from typing import Any, NamedTuple

from wingbeat.runtime.verifier.round import RoundInFlight, RoundResult

MAX_EVENTS = 200_000
"""Of one recording, some minutes of rounds; what comes later is left out."""


class TraceEvent(NamedTuple):
    """One stretch of time."""

    name: str
    start_s: float
    """Since 1970, so that recordings of several engines lie side by side."""
    seconds: float
    details: dict[str, Any] | None = None
    """Of a round; None of a phase."""


class RoundTrace:
    """Fed by a `RoundClock`, from its thread."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self._epoch_s = time.time() - time.perf_counter()
        self._begun: list[float] = []
        self._launched: deque[tuple[RoundInFlight, float]] = deque()

    def begin(self, now: float) -> None:
        """A phase begins; those within it end before it does."""
        self._begun.append(now)

    def end(self, name: str, now: float) -> None:
        """The phase that began last has ended; one that began before the recording is left out."""
        if self._begun:
            begun = self._begun.pop()
            self._add(TraceEvent(name, self._epoch_s + begun, now - begun))

    def launched(self, flight: RoundInFlight) -> None:
        """A round is on its way."""
        self._launched.append((flight, time.perf_counter()))

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """The oldest round on its way is decided; one that was launched before the recording is left out."""
        if not self._launched or self._launched[0][0] is not flight:
            return
        _, launched = self._launched.popleft()
        details = {
            "decodes": len(flight.plan.decodes),
            "prompt_tokens": sum(chunk.length for chunk in flight.plan.chunks),
            "tree_nodes": sum(result.num_valid) - len(result.num_valid),
            "tokens": sum(map(len, result.token_ids)) + sum(map(len, result.chunk_token_ids)),
            "forward_ms": round(1e3 * flight.times.forward_s, 3),
        }
        self._add(TraceEvent("round", self._epoch_s + launched, time.perf_counter() - launched, details))

    def abandoned(self) -> None:
        """The rounds on their way will never be decided."""
        self._launched.clear()

    def _add(self, event: TraceEvent) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
