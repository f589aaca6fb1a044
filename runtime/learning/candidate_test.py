"""Compares a candidate head with the served head on held-out requests, by drafting for recorded texts."""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.learning.gate import Gate
from wingbeat.runtime.learning.shadow import Drafted, draft_in_shadow
from wingbeat.runtime.learning.text_groups import WIDTH, TextGroups, histogram
from wingbeat.runtime.learning.trainer import OnlineTrainer
from wingbeat.runtime.recordings.format import RecordingError
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.ring import RoundRing
from wingbeat.runtime.training.family import TrainedHead
from wingbeat.runtime.training.sources import tap_columns

MOST_HELD = 512
"""Maximum number of held-out requests in one test; the newest are used."""


class _Request(NamedTuple):
    """Held-out request; its record is read only when the heads draft for it."""

    reader: RecordingReader
    sequence: int


class CandidateTest:
    """Test of one candidate against the served head.

    Args:
        number: number of this test among all tests, starting at 1.
        margin: relative gain that the candidate must exceed.
        against: version of the served head.
        heads: candidate and served head.
        ring: source of held-out requests; the heads draft for the newest first, because these resemble current traffic
            most.
    """

    def __init__(
        self,
        number: int,
        margin: float,
        against: int,
        heads: tuple[TrainedHead, TrainedHead],
        trainer: OnlineTrainer,
        ring: RoundRing,
    ) -> None:
        self.number, self.against = number, against
        self._margin = margin
        self._candidate, self._served = heads
        self._family, self._chain, self._ring = trainer.family, trainer.chain, ring
        self._newest = 0
        """Time up to which recorded requests are already in the test, in nanoseconds since 1970."""
        self._waiting: deque[_Request] = deque(maxlen=MOST_HELD)
        """Requests for which the heads must still draft, newest first. If the queue is full, a new request displaces
        the oldest.
        """
        self._seen: list[tuple[Tensor, Drafted, Drafted]] = []
        """For each request for which both heads have drafted: its token histogram, and the rounds of the candidate and
        of the served head.
        """
        self._take()
        self._group()

    def _group(self) -> None:
        """Divides all known texts into groups again, and repeats the test with the requests seen so far.

        The groups are determined by the texts alone, so they do not depend on the heads' results.
        """
        waiting = [histogram(request.reader.token_ids(request.sequence)) for request in self._waiting]
        texts = [*waiting, *(text for text, _, _ in self._seen)]
        self._groups = TextGroups(torch.stack(texts) if texts else torch.zeros(0, WIDTH))
        self.gate = Gate(self.number, self._margin, self._chain + 1, self._groups.count)
        for text, new, old in self._seen:
            self.gate.see(new, old, self._groups.find_group(text))

    @property
    def done(self) -> bool:
        """Whether there are no more requests for which the heads must draft."""
        return not self._waiting

    def renew(self) -> None:
        """Adds the requests recorded since the last call.

        Divides the texts into groups again if their number has doubled since the last grouping.
        """
        self._take()
        if len(self._waiting) + len(self._seen) >= 2 * max(self._groups.num_texts, 1):
            self._group()

    def _take(self) -> None:
        for made_at, folder in self._ring.held_since(self._newest):
            self._newest = made_at
            try:
                reader = RecordingReader(folder)
            except RecordingError:  # the shard is being written or was removed; other shards remain
                continue
            self._waiting.extendleft(_Request(reader, sequence) for sequence in range(reader.num_sequences))

    def see_next(self) -> None:
        """Drafts for the next waiting request with both heads, and adds the result to the test."""
        reader, sequence = self._waiting.popleft()
        record, columns = reader.record(sequence), tap_columns(reader, self._candidate.tap_layers)
        new, old = (
            draft_in_shadow(self._family, head, record, self._chain, columns)
            for head in (self._candidate, self._served)
        )
        if new is not None and old is not None:
            text = histogram(record.token_ids)
            self._seen.append((text, new, old))
            self.gate.see(new, old, self._groups.find_group(text))
