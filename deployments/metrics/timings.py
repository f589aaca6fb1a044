"""Timings of an answer, as its client sees them."""

import time
from collections.abc import Callable
from typing import Any

from wingbeat.deployments.request_context import current

FIELDS = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


class Timings:
    """Timings of one answer, measured from the arrival of its request.

    Args:
        num_choices: choices of the request.
        clock: returns seconds; must be the clock of `RequestContext.arrived_at`.
    """

    def __init__(self, num_choices: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        context = current()
        self._arrived_at = clock() if context is None else context.arrived_at
        self._first_at: list[float | None] = [None] * num_choices
        self._last_at = [0.0] * num_choices
        self._num_tokens = [0] * num_choices
        self._queue_s = 0.0

    def add(self, index: int, num_tokens: int, queue_s: float) -> None:
        """Records new tokens of a choice; called once per message."""
        self._queue_s = max(self._queue_s, queue_s)
        if not num_tokens:
            return
        now = self._clock()
        if self._first_at[index] is None:
            self._first_at[index] = now
        self._last_at[index] = now
        self._num_tokens[index] += num_tokens

    def as_dict(self) -> dict[str, Any]:
        """Returns the timing fields of an answer's `metrics`, in milliseconds and tokens/s; a field that cannot be
        computed is null. The field `speculative_decoding` of `metrics` is not included.
        """
        begun = [(first, last) for first, last in zip(self._first_at, self._last_at, strict=True) if first is not None]
        if not begun:
            return dict.fromkeys(FIELDS)
        first_at, last_at = min(first for first, _ in begun), max(self._last_at)
        # The times between tokens are measured separately for each choice, because choices run concurrently.
        num_gaps = sum(self._num_tokens) - len(begun)
        gaps_s = sum(last - first for first, last in begun)
        total_s = last_at - self._arrived_at
        values = (
            _ms(first_at - self._arrived_at),
            _ms(last_at - first_at),
            _ms(self._queue_s),
            _ms(gaps_s / num_gaps) if num_gaps else None,
            round(sum(self._num_tokens) / total_s, 3) if total_s else None,
        )
        return dict(zip(FIELDS, values, strict=True))


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
