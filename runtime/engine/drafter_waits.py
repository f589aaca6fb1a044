"""Waits of an engine's rounds for the drafter. Each wait is bounded, even if the drafter died or hangs.

A drafter that does not answer in time is late: rounds continue without drafts until the answer arrives. A drafter that
stays late for `DrafterWaits.patience_s` is lost. The channel detects a dead process sooner.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import Outcome, TreeReply

LEAST_S = 0.15
"""Shortest bound of a wait, in seconds."""
TIMES_USUAL, MOST_BOUNDS = 2.0, 4.0
"""`TIMES_USUAL`: bound of a wait, as a multiple of the usual answer time. `MOST_BOUNDS`: upper limit of the time with
which a late answer enters the moving average, as a multiple of that bound.
"""
WEIGHT = 1 / 8
"""Weight of the latest answer in the moving average of answer times."""
FIRST_REPLY_S = 60.0
"""Seconds to wait for the first answer of a drafter that may have to compile kernels, before the drafter counts as
stuck."""

Answer = TypeVar("Answer")


class DrafterWaits:
    """Waits for one drafter at a time, and tracks how long its answers usually take.

    Args:
        timeout_s: seconds of silence after which a drafter counts as stuck.
        on_cpu: whether the drafter runs on a CPU, where it compiles no kernels.
        clock: monotonic time in seconds.
    """

    def __init__(self, timeout_s: float, on_cpu: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._on_cpu, self._clock = timeout_s, on_cpu, clock
        self._usual_s = 0.0
        self._heard = self._unbounded = False
        self._late_since = 0.0

    def attached(self, is_same: bool) -> None:
        """Prepares for an attached drafter.

        `is_same`: whether the same drafter was attached before, so that its kernels are compiled.
        """
        self._heard = self._heard and is_same

    @property
    def patience_s(self) -> float:
        """Silence in seconds after which the drafter counts as stuck."""
        return max(self._timeout_s, 0.0 if self._heard or self._on_cpu else FIRST_REPLY_S)

    @property
    def bound_s(self) -> float:
        """Longest wait of a round, in seconds."""
        if self._unbounded:
            return self.patience_s
        return min(max(LEAST_S, TIMES_USUAL * self._usual_s), self.patience_s)

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Within the `with` block, a wait may last up to `patience_s`; for rounds whose results no client awaits."""
        self._unbounded = True
        try:
            yield
        finally:
            self._unbounded = False

    def acquire(self, end: VerifierEnd) -> Outcome | None:
        """Returns the buffers of the next round; None if the drafter still uses the buffers when the bound is over."""
        return self._timed(lambda: end.acquire_outcome(self.bound_s))

    def reply(self, end: VerifierEnd, round_number: int) -> TreeReply | None:
        """Returns the answer to a round; None if the answer does not arrive in time.

        A device may wait in place of the host, except for a drafter that takes long: its times must be measured here,
        because the bound follows them.
        """
        by_device = self.bound_s <= LEAST_S
        reply = self._timed(lambda: end.wait_reply(round_number, self.bound_s, by_device=by_device))
        self._heard |= reply is not None
        return reply

    def late_reply(self, end: VerifierEnd, round_number: int) -> bool:
        """Whether an answer that missed its deadline has arrived by now; does not wait."""
        if end.wait_reply(round_number, 0.0) is None:
            return False
        # Without the cap, a single late answer would make later waits much longer.
        self._took(min(self._clock() - self._late_since, MOST_BOUNDS * self.bound_s))
        return True

    @property
    def is_over(self) -> bool:
        """Whether a late drafter has been late for `patience_s`."""
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
