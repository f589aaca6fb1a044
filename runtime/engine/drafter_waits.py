"""The only waits of an engine's rounds for its drafter: each ends within a bound, whatever became of the drafter.

A drafter that does not answer in time is late. Rounds go on plainly until its answer is there, and it is lost once its
patience is over. A process that died is noticed sooner, by the channel.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import Outcome, TreeReply

LEAST_S = 0.15
"""Bound of a wait for a drafter that usually answers sooner."""
TIMES_USUAL, MOST_BOUNDS = 2.0, 4.0
"""Bound of a wait by the usual time, and most that a late answer counts as, by the bound."""
WEIGHT = 1 / 8
"""Share of the latest answer in the average time that answers are waited for."""
FIRST_REPLY_S = 60.0
"""Patience before a drafter's first answer where it may have to compile its kernels for that."""

Answer = TypeVar("Answer")


class DrafterWaits:
    """Waits for one drafter at a time, and how long its answers usually take.

    Args:
        timeout_s: silence after which a drafter counts as stuck.
        on_cpu: whether drafters have no kernels to compile.
        clock: seconds, monotonic.
    """

    def __init__(self, timeout_s: float, on_cpu: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._on_cpu, self._clock = timeout_s, on_cpu, clock
        self._usual_s = 0.0
        self._heard = self._unbounded = False
        self._late_since = 0.0

    def attached(self, is_same: bool) -> None:
        """Another drafter is waited for from now on, or the same one again."""
        self._heard = self._heard and is_same

    @property
    def patience_s(self) -> float:
        """Silence after which the drafter counts as stuck."""
        return max(self._timeout_s, 0.0 if self._heard or self._on_cpu else FIRST_REPLY_S)

    @property
    def bound_s(self) -> float:
        """Longest wait of a round."""
        if self._unbounded:
            return self.patience_s
        return min(max(LEAST_S, TIMES_USUAL * self._usual_s), self.patience_s)

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Within the block a drafter is never late: nobody's text waits for the rounds."""
        self._unbounded = True
        try:
            yield
        finally:
            self._unbounded = False

    def acquire(self, end: VerifierEnd) -> Outcome | None:
        """Buffers of the next round; None where the drafter still uses them."""
        return self._timed(lambda: end.acquire_outcome(self.bound_s))

    def reply(self, end: VerifierEnd, round_number: int) -> TreeReply | None:
        """The answer to a round; None where it does not come in time."""
        reply = self._timed(lambda: end.wait_reply(round_number, self.bound_s))
        self._heard |= reply is not None
        return reply

    def late_reply(self, end: VerifierEnd, round_number: int) -> bool:
        """Whether an answer that did not come in time is there by now; waits for nothing."""
        if end.wait_reply(round_number, 0.0) is None:
            return False
        # A single answer, however late, makes no later wait much longer.
        self._took(min(self._clock() - self._late_since, MOST_BOUNDS * self.bound_s))
        return True

    @property
    def is_over(self) -> bool:
        """Whether a late drafter's patience is over."""
        return self._clock() - self._late_since >= self.patience_s

    def _timed(self, wait: Callable[[], Answer | None]) -> Answer | None:
        started = self._clock()
        answer = wait()
        if answer is None:
            self._late_since = started
        else:
            self._took(self._clock() - started)
        return answer

    def _took(self, seconds: float) -> None:
        self._usual_s += WEIGHT * (seconds - self._usual_s)
