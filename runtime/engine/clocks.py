"""Clocks of an engine: measure host time by phase and by round, and latency and token counts of requests."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from wingbeat.runtime.metrics import PREEMPTIONS, REQUEST_S, ROUND_TOKENS, Histogram
from wingbeat.runtime.protocol.messages import DRAFT_PARTS, DrafterFigures
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.scheduling.request import Request, RequestOutput
from wingbeat.runtime.scheduling.sequence import Sequence


@dataclass
class PhaseTimes:
    """Host seconds in each phase, summed over all rounds.

    On an accelerator, most of this time is spent on enqueueing kernels.
    """

    num_rounds: int = 0
    schedule_s: float = 0.0
    draft_wait_s: float = 0.0
    """Seconds of waiting for trees and of ringing the drafter's doorbell. Ringing is included, because a drafter on the
    same core may run during that time."""
    verify_s: float = 0.0
    """Seconds of the verifier's forward passes."""
    accept_s: float = 0.0
    """Seconds of flattening the batch, choosing tokens, walking trees and compacting KV."""
    publish_s: float = 0.0
    wait_s: float = 0.0
    """Seconds of waiting for the accepted tokens after the host has finished its other work of the round."""
    update_s: float = 0.0


class Phase:
    """Measures the time within its `with` blocks, excluding nested phases."""

    def __init__(self, clock: "RoundClock", name: str) -> None:
        self._clock = clock
        self.name = name
        self.seconds = 0.0

    def __enter__(self) -> None:
        clock = self._clock
        clock.switch()
        clock.open.append(self)
        for trace in clock.traces:
            trace.begin(clock.since)

    def __exit__(self, *raised: object) -> None:
        clock = self._clock
        clock.switch()
        clock.open.pop()
        for trace in clock.traces:
            trace.end(self.name, clock.since)


class RoundClock(RoundObserver):
    """Measures the time of each phase of an engine's rounds; a phase is a context manager: `with clock.schedule:`."""

    def __init__(self) -> None:
        self.traces: list[Any] = []
        """Observers of phases, rounds and drafts, such as a recorded trace."""
        self._drafter_us: tuple[int, ...] = ()
        self.drafter = DrafterFigures()
        """Figures of the drafter's latest answer."""
        self.reset()

    def reset(self) -> None:
        """Resets all times; call it between two rounds."""
        self._num_rounds = 0
        self.draft_s = {"draft_commit": 0.0, "draft_levels": 0.0}
        """Seconds on the drafter's device, by stage; stages of DRAFT_PARTS are parts of `draft_levels`."""
        self.since = 0.0
        """`time.perf_counter` of the latest phase change, in seconds."""
        self.open: list[Phase] = []
        """Stack of nested open phases; time is charged to the innermost phase, which is last."""
        self.schedule, self.draft_wait = Phase(self, "schedule"), Phase(self, "draft_wait")
        self.verify, self.accept = Phase(self, "verify"), Phase(self, "accept")
        self.publish, self.wait, self.update = (Phase(self, name) for name in ("publish", "wait", "update"))
        self._told = dict.fromkeys((self.draft_wait, self.publish, *self._host_phases), 0.0)

    @property
    def times(self) -> PhaseTimes:
        """Seconds by phase since the last reset."""
        phases = (self.schedule, self.draft_wait, self.verify, self.accept, self.publish, self.wait, self.update)
        return PhaseTimes(self._num_rounds, *(phase.seconds for phase in phases))

    def drafted(self, figures: DrafterFigures, request_ids: Callable[[], list[str]]) -> None:
        """Records the timings and counters that the drafter sent with an answer.

        Args:
            request_ids: function that returns the ids of the requests for which the answer contains trees; called only
                if a trace is recorded.
        """
        # The drafter's counters restart at 0 when another drafter takes over.
        said = (figures.device_commit_us, figures.device_levels_us, *figures.device_parts_us)
        told = self._drafter_us
        if len(told) != len(said) or any(now < before for now, before in zip(said, told, strict=True)):
            told = (0,) * len(said)
        names = ("draft_commit", "draft_levels", *DRAFT_PARTS)
        for name, now, before in zip(names, said, told, strict=False):
            if now > before:
                self.draft_s[name] = self.draft_s.get(name, 0.0) + (now - before) / 1e6
        self._drafter_us = said
        self.drafter = figures
        for trace in self.traces:
            trace.drafted(figures, request_ids())

    def launched(self, flight: RoundInFlight) -> None:
        """Stores in the round's times how long the host waited for the drafter's trees.

        The forward pass was launched within the phase `accept`, so its seconds are moved from `accept` to `verify`.
        """
        flight.times.draft_s = self._take(self.draft_wait)
        self.verify.seconds += flight.times.forward_s
        self.accept.seconds -= flight.times.forward_s
        for trace in self.traces:
            trace.launched(flight)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Adds to the round's times the host time that has passed since the previous round was settled."""
        self._num_rounds += 1
        self.switch()
        flight.times.publish_s = self._take(self.publish)
        flight.times.host_s = sum(map(self._take, self._host_phases))
        for trace in self.traces:
            trace.settled(flight, result)

    def abandoned(self) -> None:
        """Discards the host time of abandoned rounds, so that this time is not added to a later round."""
        for phase in self._told:
            self._take(phase)
        for trace in self.traces:
            trace.abandoned()

    @property
    def _host_phases(self) -> tuple[Phase, ...]:
        return self.schedule, self.accept, self.wait, self.update

    def _take(self, phase: Phase) -> float:
        seconds = phase.seconds - self._told[phase]
        self._told[phase] = phase.seconds
        return seconds

    def switch(self) -> None:
        """Adds the time since the last phase change to the innermost open phase."""
        now = time.perf_counter()
        if self.open:
            self.open[-1].seconds += now - self.since
        self.since = now


def _seconds() -> Histogram:
    return Histogram(REQUEST_S)


@dataclass
class RequestTimes:
    """Durations and counts of an engine's requests; an aborted request counts in each phase that it completed."""

    num_prompt_tokens: int = 0
    """Number of prompt tokens of requests that produced a token; tokens found in the prefix cache are included."""
    num_generation_tokens: int = 0
    queue_s: Histogram = field(default_factory=_seconds)
    """Seconds from arrival in the engine to the first slot."""
    prefill_s: Histogram = field(default_factory=_seconds)
    """Seconds from the first slot to the first token."""
    decode_s: Histogram = field(default_factory=_seconds)
    """Seconds from the first token to the last."""
    inference_s: Histogram = field(default_factory=_seconds)
    """Seconds from the first slot to the last token."""
    num_preemptions: Histogram = field(default_factory=lambda: Histogram(PREEMPTIONS))
    """Preemptions of each request that has ended."""
    round_tokens: Histogram = field(default_factory=lambda: Histogram(ROUND_TOKENS))
    """Number of tokens of each round: prompt tokens computed plus tokens generated."""


@dataclass(slots=True)
class _Running:
    """Times of a request that has not ended, in seconds of the `RequestClock`'s clock."""

    num_prompt_tokens: int
    arrived_at: float
    admitted_at: float | None = None
    """Time of the first slot; always set before the first token."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_preemptions: int = 0
    """Number of slots after the first."""


class RequestClock(RoundObserver):
    """Measures times of an engine's requests, in the engine's thread; requests without a call of `arrived` are ignored.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self.reset()

    def reset(self) -> None:
        """Resets all sums."""
        self.times = RequestTimes()
        self._num_chunk_tokens = 0

    def arrived(self, request: Request) -> None:
        """Stores the time at which a request was queued."""
        self._running[request.request_id] = _Running(len(request.prompt_token_ids), self._clock())

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request has never had a slot."""
        running = self._running.get(request_id)
        return running is not None and running.admitted_at is None

    def admitted(self, seqs: Iterable[Sequence]) -> None:
        """Ends the queue time of requests that get their first slot.

        Counts a preemption for requests that get a further slot.
        """
        for seq in seqs:
            running = self._running.get(seq.request.request_id)
            if running is None:
                continue
            if running.admitted_at is not None:
                running.num_preemptions += 1
            else:
                running.admitted_at = self._clock()
                self.times.queue_s.observe(running.admitted_at - running.arrived_at)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Stores the number of prompt tokens that the round computed."""
        self._num_chunk_tokens = sum(chunk.length for chunk in flight.plan.chunks if not chunk.replay)

    def took(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Counts a settled round's tokens; returns the outputs, adding the queue time to a request's first output."""
        now, times, num_tokens = self._clock(), self.times, 0
        for index, output in enumerate(outputs):
            running = self._running.get(output.request_id)
            if running is None or not output.token_ids:
                continue
            num_tokens += len(output.token_ids)
            running.last_token_at = now
            if running.first_token_at is None:
                running.first_token_at = now
                times.num_prompt_tokens += running.num_prompt_tokens
                times.prefill_s.observe(now - running.admitted_at)
                outputs[index] = output._replace(queue_s=running.admitted_at - running.arrived_at)
        times.num_generation_tokens += num_tokens
        if num_tokens or self._num_chunk_tokens:
            times.round_tokens.observe(num_tokens + self._num_chunk_tokens)
        return outputs

    def ended(self, request_id: str) -> None:
        """Records the times of a request that finished, failed or was aborted."""
        running = self._running.pop(request_id, None)
        if running is None or running.first_token_at is None:
            return
        self.times.num_preemptions.observe(running.num_preemptions)
        self.times.decode_s.observe(running.last_token_at - running.first_token_at)
        self.times.inference_s.observe(running.last_token_at - running.admitted_at)
