"""Selects the waiting request that gets the next free slot.

Requests of the highest priority are admitted in order of arrival, except that one slot in four goes to the shortest of
them. A short request therefore waits for a few free slots however many long ones are before it, and a long request
waits for a third more of them than in order of arrival. No slot is kept free and no sequence is preempted for this.
"""

from collections import deque
from operator import attrgetter

from wingbeat.runtime.scheduling.sequence import Sequence

SHORT_TURN = 4
"""Number of admissions of which one goes to the shortest request."""
SHORT = 0.5
"""Largest share of the oldest request's tokens, prompt plus max_tokens, at which another request counts as short."""


class AdmissionOrder:
    """Chooses waiting sequences and counts admissions; a preempted sequence keeps its place before all others."""

    def __init__(self) -> None:
        self._num_in_order = 0
        """Admissions in order of arrival since the last one out of order."""
        self._oldest: Sequence | None = None

    def choose(self, waiting: deque[Sequence]) -> Sequence:
        """The sequence to admit next, from a non-empty queue in order of arrival."""
        priority = max(map(_priority, waiting))
        candidates = [seq for seq in waiting if seq.request.params.priority == priority]
        oldest = self._oldest = candidates[0]
        if oldest.preempted or self._num_in_order < SHORT_TURN - 1:
            return oldest
        shortest = min(candidates, key=attrgetter("num_tokens_at_most"))
        return shortest if shortest.num_tokens_at_most <= SHORT * oldest.num_tokens_at_most else oldest

    def take(self, seq: Sequence, waiting: deque[Sequence]) -> None:
        """Removes an admitted sequence from the queue."""
        waiting.remove(seq)
        self._num_in_order = self._num_in_order + 1 if seq is self._oldest else 0


def _priority(seq: Sequence) -> int:
    return seq.request.params.priority
