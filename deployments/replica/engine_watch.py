"""When an engine is stuck: it is at one piece of work for longer than its size and what went before explain.

Knows of processes and event loops as little as of clocks: it is shown beats, and the time.
"""

from typing import NamedTuple

from wingbeat.cluster.channels.pulse import Beat, Work, size_class

ROUNDS = 10.0
"""How many times as long as the slowest round of its size a round may take, beyond the setting's seconds."""
UNKNOWN_SIZE = 4.0
"""Times the setting's seconds, for a round of a size that this engine has not run: kernels may be compiled for it; and
for its first round, where another engine has run here before."""
FIRST = 10.0
"""The same, for the first round of the first engine: nothing is known of how fast it is here."""
CALLS = 10.0
"""Times what a round may take, for a call such as attaching a drafter, which runs and measures many passes."""
STALLED_SHARE = 1 / 3
"""Of the time after which it is stuck; from then on routers send requests elsewhere, if they can."""
LOOK_S = 0.5
"""Between two looks; time in which the watcher itself does not run, as where both are stopped, does not count."""


class Look(NamedTuple):
    """What a look at an engine has found."""

    stalled: bool = False
    stuck: str | None = None
    """What it is stuck in, in words; None where it is not."""


class EngineWatch:
    """Watches one life of an engine.

    Args:
        stuck_after_s: what any round may take.
        is_first: whether no other engine has run in this replica.
    """

    def __init__(self, stuck_after_s: float, is_first: bool = True) -> None:
        self._stuck_after_s = stuck_after_s
        self._first = FIRST if is_first else UNKNOWN_SIZE
        self._seen: tuple[int, int] | None = None
        self._looked_at = 0.0
        self._seconds = 0.0

    def look(self, now: float, beat: Beat, slowest_s: tuple[float, ...], num_read: int, unread: bool) -> Look:
        """Compare with the last look.

        Args:
            now: a clock's seconds.
            slowest_s: `Pulse.slowest_s`.
            num_read: bytes that the engine has taken from its replica.
            unread: whether there are more, which an engine without work takes at once.
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
        """What this piece of work may take."""
        if beat.work is Work.CALL:
            return CALLS * max(self._stuck_after_s, ROUNDS * max(slowest_s))
        if beat.work is not Work.ROUND or not beat.size:
            return self._stuck_after_s
        index = size_class(beat.size)
        if slowest_s[index]:
            return max(self._stuck_after_s, ROUNDS * slowest_s[index])
        if not any(slowest_s):
            return self._first * self._stuck_after_s
        # A round of more tokens takes at most as many times as long, one of fewer tokens no longer.
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
