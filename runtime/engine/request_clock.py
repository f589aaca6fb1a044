"""What an engine's requests take: seconds of each phase, and tokens."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from wingbeat.runtime.histogram import REQUEST_S, ROUND_TOKENS, Histogram
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.scheduling.request import Request, RequestOutput
from wingbeat.runtime.scheduling.sequence import Sequence


def _seconds() -> Histogram:
    return Histogram(REQUEST_S)


@dataclass
class RequestTimes:
    """Sums over an engine's requests. Those that were aborted count with the phases that they went through."""

    num_prompt_tokens: int = 0
    """Of prompts that were computed or found in the prefix cache."""
    num_generation_tokens: int = 0
    queue_s: Histogram = field(default_factory=_seconds)
    """From arrival in the engine to the first slot."""
    prefill_s: Histogram = field(default_factory=_seconds)
    """From there to the first token."""
    decode_s: Histogram = field(default_factory=_seconds)
    """From there to the last one."""
    inference_s: Histogram = field(default_factory=_seconds)
    """From the first slot to the last token."""
    round_tokens: Histogram = field(default_factory=lambda: Histogram(ROUND_TOKENS))
    """Prompt tokens computed and tokens generated, by round."""


@dataclass(slots=True)
class _Running:
    """One request that has not ended. Times are the clock's."""

    num_prompt_tokens: int
    arrived_at: float
    admitted_at: float | None = None
    """Before its first token, in any case."""
    first_token_at: float | None = None
    last_token_at: float = 0.0


class RequestClock(RoundObserver):
    """Times an engine's requests; all calls come from its thread. Those it was not told of do not count.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.times = RequestTimes()
        self._num_chunk_tokens = 0

    def arrived(self, request: Request) -> None:
        """A request was queued."""
        self._running[request.request_id] = _Running(len(request.prompt_token_ids), self._clock())

    def is_waiting(self, request_id: str) -> bool:
        """Whether it has never had a slot."""
        running = self._running.get(request_id)
        return running is not None and running.admitted_at is None

    def admitted(self, seqs: Iterable[Sequence]) -> None:
        """Whoever gets its first slot waits no longer."""
        for seq in seqs:
            running = self._running.get(seq.request.request_id)
            if running is not None and running.admitted_at is None:
                running.admitted_at = self._clock()
                self.times.queue_s.observe(running.admitted_at - running.arrived_at)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Count the prompt tokens that were computed."""
        self._num_chunk_tokens = sum(chunk.length for chunk in flight.plan.chunks if not chunk.replay)

    def took(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Note a settled round's tokens; the first output of a request comes back with its wait."""
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
        """A request is over, however it ended."""
        running = self._running.pop(request_id, None)
        if running is None or running.first_token_at is None:
            return
        self.times.decode_s.observe(running.last_token_at - running.first_token_at)
        self.times.inference_s.observe(running.last_token_at - running.admitted_at)
