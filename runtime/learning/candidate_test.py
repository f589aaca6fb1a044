"""A candidate beside the served head, over the held-out requests that are still to be drafted for."""

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
"""Held-out requests of one test: the newest ones."""


class _Request(NamedTuple):
    """A held-out request; what it holds is read when it is its turn."""

    reader: RecordingReader
    sequence: int


class CandidateTest:
    """Test of one candidate.

    Args:
        number: of the candidate among all, from 1 on.
        against: version of the served head.
        ring: whose held-out requests are drafted for, the newest first: they are of what is served now.
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
        """Held-out requests up to this moment were taken, in nanoseconds since 1970."""
        self._waiting: deque[_Request] = deque(maxlen=MOST_HELD)
        """Newest first; with one more, the oldest makes room."""
        self._seen: list[tuple[Tensor, Drafted, Drafted]] = []
        """Histogram of each request that was drafted for, and what came of it."""
        self._take()
        self._group()

    def _group(self) -> None:
        """Find groups in all texts that are known, and judge what was seen in these: neither looks at outcomes."""
        waiting = [histogram(request.reader.token_ids(request.sequence)) for request in self._waiting]
        texts = [*waiting, *(text for text, _, _ in self._seen)]
        self._groups = TextGroups(torch.stack(texts) if texts else torch.zeros(0, WIDTH))
        self.gate = Gate(self.number, self._margin, self._chain + 1, self._groups.count)
        for text, new, old in self._seen:
            self.gate.see(new, old, self._groups.of(text))

    @property
    def done(self) -> bool:
        """Whether nothing is left to see for now."""
        return not self._waiting

    def renew(self) -> None:
        """Take the requests that came in since, each once; with twice as many as were grouped, group them anew."""
        self._take()
        if len(self._waiting) + len(self._seen) >= 2 * max(self._groups.num_texts, 1):
            self._group()

    def _take(self) -> None:
        for made_at, folder in self._ring.held_since(self._newest):
            self._newest = made_at
            try:
                reader = RecordingReader(folder)
            except RecordingError:  # it is being written, or has made room: others are there
                continue
            self._waiting.extendleft(_Request(reader, sequence) for sequence in range(reader.num_sequences))

    def see_next(self) -> None:
        """Count a request for which both have drafted."""
        reader, sequence = self._waiting.popleft()
        record, columns = reader.record(sequence), tap_columns(reader, self._candidate.tap_layers)
        new, old = (
            draft_in_shadow(self._family, head, record, self._chain, columns)
            for head in (self._candidate, self._served)
        )
        if new is not None and old is not None:
            text = histogram(record.token_ids)
            self._seen.append((text, new, old))
            self.gate.see(new, old, self._groups.of(text))
