"""Where the host's time goes: by phase over all rounds, and by round."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult

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


@dataclass
class PhaseTimes:
    """Host seconds spent in each phase of the rounds so far; on an accelerator, mostly spent on enqueueing."""

    num_rounds: int = 0
    schedule_s: float = 0.0
    draft_wait_s: float = 0.0
    """Ringing for the drafter, too: where it shares the core, that is waiting for it."""
    verify_s: float = 0.0
    """The verifier's forward passes."""
    accept_s: float = 0.0
    """Flattening the batch, choosing tokens, walking trees, compacting KV."""
    publish_s: float = 0.0
    wait_s: float = 0.0
    """For the accepted tokens: what the device still has to do when the host has nothing left to do."""
    update_s: float = 0.0


class Phase:
    """Counts the time within its `with` blocks, less that of phases within them."""

    def __init__(self, clock: "RoundClock", name: str) -> None:
        self._clock = clock
        self.name = name
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._clock.begin(self)

    def __exit__(self, *raised: object) -> None:
        self._clock.end()


class RoundClock(RoundObserver):
    """Times the phases of an engine's rounds: `with clock.schedule:` and so on."""

    def __init__(self) -> None:
        self._traces: list[RoundTrace] = []
        self.reset()

    def reset(self) -> None:
        """Start anew, between two rounds."""
        self._num_rounds = 0
        self._since = 0.0
        self._open: list[Phase] = []
        self.schedule, self.draft_wait = Phase(self, "schedule"), Phase(self, "draft_wait")
        self.verify, self.accept = Phase(self, "verify"), Phase(self, "accept")
        self.publish, self.wait, self.update = (Phase(self, name) for name in ("publish", "wait", "update"))
        self._told = dict.fromkeys((self.draft_wait, self.publish, *self._host_phases), 0.0)

    @property
    def times(self) -> PhaseTimes:
        """So far."""
        phases = (self.schedule, self.draft_wait, self.verify, self.accept, self.publish, self.wait, self.update)
        return PhaseTimes(self._num_rounds, *(phase.seconds for phase in phases))

    def record(self) -> RoundTrace:
        """A recording that begins now, between two rounds."""
        self._traces.append(RoundTrace())
        return self._traces[-1]

    def stop(self, trace: RoundTrace) -> None:
        """End a recording."""
        self._traces.remove(trace)

    def begin(self, phase: Phase) -> None:
        """From now on time is this phase's."""
        self._switch()
        self._open.append(phase)
        for trace in self._traces:
            trace.begin(self._since)

    def end(self) -> None:
        """From now on time is the phase's before it."""
        self._switch()
        phase = self._open.pop()
        for trace in self._traces:
            trace.end(phase.name, self._since)

    def launched(self, flight: RoundInFlight) -> None:
        """Its trees have been waited for; its forward pass lay within `accept`."""
        flight.times.draft_s = self._take(self.draft_wait)
        self.verify.seconds += flight.times.forward_s
        self.accept.seconds -= flight.times.forward_s
        for trace in self._traces:
            trace.launched(flight)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Charge this round with the host time that no earlier round was charged with."""
        self._num_rounds += 1
        self._switch()
        flight.times.publish_s = self._take(self.publish)
        flight.times.host_s = sum(map(self._take, self._host_phases))
        for trace in self._traces:
            trace.settled(flight, result)

    def abandoned(self) -> None:
        """Discard the time of abandoned rounds."""
        for phase in self._told:
            self._take(phase)
        for trace in self._traces:
            trace.abandoned()

    @property
    def _host_phases(self) -> tuple[Phase, ...]:
        return self.schedule, self.accept, self.wait, self.update

    def _take(self, phase: Phase) -> float:
        seconds = phase.seconds - self._told[phase]
        self._told[phase] = phase.seconds
        return seconds

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._open[-1].seconds += now - self._since
        self._since = now
