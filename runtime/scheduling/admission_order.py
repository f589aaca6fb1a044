"""Which waiting request gets the next free slot.

Of those of the highest priority whoever came first, but one slot in four goes to the shortest of them: a short request
waits for a few slots to come free, however many long ones are before it, and a long one waits for a third more of them
than in order of arrival. No slot is kept free for anybody, and nobody is preempted for it.
"""

from collections import deque
from operator import attrgetter

from wingbeat.runtime.scheduling.sequence import Sequence

SHORT_TURN = 4
"""One admission in so many goes to the shortest."""
SHORT = 0.5
"""Share of the oldest's tokens, prompt and answer, up to which another request counts as short."""


class AdmissionOrder:
    """Counts admissions; a sequence that was preempted keeps its place before all others."""

    def __init__(self) -> None:
        self._num_in_order = 0
        """Since the last one out of order."""
        self._oldest: Sequence | None = None

    def choose(self, waiting: deque[Sequence]) -> Sequence:
        """Whose turn it is, of a queue that is not empty, in order of arrival."""
        priority = max(map(_priority, waiting))
        candidates = [seq for seq in waiting if seq.request.params.priority == priority]
        oldest = self._oldest = candidates[0]
        if oldest.preempted or self._num_in_order < SHORT_TURN - 1:
            return oldest
        shortest = min(candidates, key=attrgetter("num_tokens_at_most"))
        return shortest if shortest.num_tokens_at_most <= SHORT * oldest.num_tokens_at_most else oldest

    def take(self, seq: Sequence, waiting: deque[Sequence]) -> None:
        """Remove from the queue what was chosen and could be admitted."""
        waiting.remove(seq)
        self._num_in_order = self._num_in_order + 1 if seq is self._oldest else 0


def _priority(seq: Sequence) -> int:
    return seq.request.params.priority
