"""Decides when an engine is stuck, that is, when a piece of work takes longer than is plausible for its size and the
durations of earlier rounds.

This module uses no processes, event loops or clocks; callers pass the engine's current piece of work (`Beat`) and the
time.
"""

from typing import NamedTuple

from wingbeat.cluster.channels.pulse import Beat, Work, size_class

ROUNDS = 10.0
"""A round may take this many times as long as the slowest round of its size class so far, but the limit is never below
stuck_after_s.
"""
UNKNOWN_SIZE = 4.0
"""Factor on stuck_after_s for a round of a size class that has not run yet, because such a round may compile kernels;
also for an engine's first round if another engine has run in this replica before.
"""
FIRST = 10.0
"""Factor on stuck_after_s for the first round of a replica's first engine, whose speed is not known yet."""
CALLS = 10.0
"""Factor on a round's limit for calls of the replica. Some calls are long, such as `attach_drafter`, which runs and
measures many passes.
"""
STALLED_SHARE = 1 / 3
"""Fraction of the limit: an engine without progress for longer than this counts as stalled; routers then prefer other
engines.
"""
LOOK_S = 0.5
"""Seconds between two looks at the engine. Time in which the watching process itself did not run is not counted, for
example while both the replica and the engine are stopped.
"""


class Look(NamedTuple):
    """Result of one look at an engine."""

    stalled: bool = False
    stuck: str | None = None
    """Text for the log that names the operation that the engine is stuck in; None if it is not stuck."""


class EngineWatch:
    """Watches one engine from its start to its end.

    Args:
        stuck_after_s: seconds that each single round may take, whatever its size.
        is_first: whether no other engine has run in this replica.
    """

    def __init__(self, stuck_after_s: float, is_first: bool = True) -> None:
        self._stuck_after_s = stuck_after_s
        self._first = FIRST if is_first else UNKNOWN_SIZE
        self._seen: tuple[int, int] | None = None
        self._looked_at = 0.0
        self._seconds = 0.0

    def look(self, now: float, beat: Beat, slowest_s: tuple[float, ...], num_read: int, unread: bool) -> Look:
        """Compare the engine's state with its state at the last look; returns whether the engine is stalled or stuck.

        Args:
            now: monotonic time in seconds.
            slowest_s: `Pulse.slowest_s`.
            num_read: bytes that the engine has read from its replica.
            unread: whether the link holds bytes that the engine has not read; an engine without work reads them at
                once.
        """
        passed_s, self._looked_at = now - self._looked_at, now
        if (beat.number, num_read) != self._seen or (beat.work is Work.NONE and not unread):
            self._seen, self._seconds = (beat.number, num_read), 0.0
            return Look()
        self._seconds += min(passed_s, 2 * LOOK_S)
        patience_s = self.patience_s(beat, slowest_s)
        if self._seconds <= patience_s:
            return Look(stalled=self._seconds > STALLED_SHARE * patience_s)
        return Look(True, f"stuck for {self._seconds:.0f} s {_in_words(beat)}, where {patience_s:.0f} s are the most")

    def patience_s(self, beat: Beat, slowest_s: tuple[float, ...]) -> float:
        """Return the seconds that the current piece of work may take."""
        if beat.work is Work.CALL:
            return CALLS * max(self._stuck_after_s, ROUNDS * max(slowest_s))
        if beat.work is not Work.ROUND or not beat.size:
            return self._stuck_after_s
        index = size_class(beat.size)
        if slowest_s[index]:
            return max(self._stuck_after_s, ROUNDS * slowest_s[index])
        if not any(slowest_s):
            return self._first * self._stuck_after_s
        # This size class has no measurements. The limit is therefore estimated from the next smaller measured class, in
        # proportion to the number of tokens, because the time of a round grows at most linearly with its tokens. If no
        # smaller class is measured, the time of the next larger measured class is used, because a smaller round takes
        # no longer.
        smaller = next((other for other in range(index, -1, -1) if slowest_s[other]), None)
        if smaller is None:
            expected_s = next(filter(None, slowest_s[index:]))
        else:
            expected_s = slowest_s[smaller] * 2 ** (index - smaller)
        return max(UNKNOWN_SIZE * self._stuck_after_s, ROUNDS * expected_s)


def _in_words(beat: Beat) -> str:
    match beat.work:
        case Work.ROUND if beat.size:
            return f"in a round of {beat.size} tokens"
        case Work.ROUND:
            return "between two rounds"
        case Work.CALL:
            return "in a call of its replica"
        case Work.MESSAGE:
            return "taking a request"
    return "without work, and reads no message"
