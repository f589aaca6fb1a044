"""Selects the waiting request that gets the next free slot.

Requests of the highest priority are admitted in order of arrival, except that one slot in four goes to the shortest
request of that priority. A short request therefore waits for only a few free slots, however many long requests arrived
earlier. A long request waits for a third more free slots than it would if all requests were admitted in order of
arrival. The rule keeps no slot free and preempts no sequence.
"""

from collections import deque
from operator import attrgetter

from wingbeat.runtime.scheduling.sequence import Sequence

SHORT_TURN = 4
"""Out of this many admissions, one goes to the shortest request."""
SHORT = 0.5
"""A request counts as short if its tokens (prompt plus max_tokens) are at most this fraction of the oldest request's
tokens.
"""


class AdmissionOrder:
    """Chooses the waiting sequence to admit, and counts admissions. Preempted sequences are chosen first."""

    def __init__(self) -> None:
        self._num_in_order = 0
        """Number of admissions in order of arrival since the last admission out of order."""
        self._oldest: Sequence | None = None

    def choose(self, waiting: deque[Sequence]) -> Sequence:
        """Returns the sequence to admit next; `waiting` is a non-empty queue in order of arrival."""
        priority = max(seq.request.params.priority for seq in waiting)
        candidates = [seq for seq in waiting if seq.request.params.priority == priority]
        oldest = self._oldest = candidates[0]
        if oldest.preempted or self._num_in_order < SHORT_TURN - 1:
            return oldest
        shortest = min(candidates, key=attrgetter("num_tokens_at_most"))
        return shortest if shortest.num_tokens_at_most <= SHORT * oldest.num_tokens_at_most else oldest

    def remove_admitted(self, seq: Sequence, waiting: deque[Sequence]) -> None:
        """Removes an admitted sequence from the queue."""
        waiting.remove(seq)
        self._num_in_order = self._num_in_order + 1 if seq is self._oldest else 0
