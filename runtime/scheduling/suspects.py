"""Who may have made a round raise, or an engine die: each runs alone until it is past that."""

import math

from wingbeat.runtime.scheduling.sequence import Sequence

MAX_UNEXPLAINED = 3
"""Rounds that may raise, though whatever ran in them passes alone, until that is the engine's own failure."""
FORGOTTEN_AFTER = 1000
"""Rounds in a row that go well until one of those is forgotten."""


class Suspects(dict[Sequence, float]):
    """Sequences of a round that raised, while it is not known which of them it was, and those that engines died under.

    By suspect, the tokens beyond which it is past that round.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_unexplained = 0
        """Rounds that raised and are not forgotten, though everything that ran in them was carried out alone."""
        self._unexplained = False
        """Whether a round has raised, and none of the suspects has yet."""
        self._num_good_rounds = 0

    def add(self, seq: Sequence, passed_at: float = math.inf) -> None:
        """Run a sequence alone until it has more tokens than `passed_at`."""
        self[seq] = passed_at

    def round_raised(self, drafted: bool) -> None:
        """Another round raised.

        Args:
            drafted: see `Scheduler.restart`; that explains the round where no sequence does.

        Raises:
            RuntimeError: too often already that was no sequence's doing.
        """
        if self.num_unexplained == MAX_UNEXPLAINED and not drafted:
            raise RuntimeError(f"{MAX_UNEXPLAINED} rounds raised in which every sequence passed alone")
        self._unexplained |= not drafted
        self._num_good_rounds = 0

    def round_went_well(self) -> None:
        """Enough of these make up for one that raised; rounds of one suspect do not count."""
        if self:
            return
        self._num_good_rounds += 1
        if self._num_good_rounds == FORGOTTEN_AFTER:
            self._num_good_rounds = 0
            self.num_unexplained -= 1

    def failed(self, seq: Sequence) -> None:
        """A sequence raised alone: where it is a suspect, that explains the round."""
        self._unexplained &= seq not in self

    def is_past(self, seq: Sequence) -> bool:
        """Whether a suspect has gone through the round that raised."""
        return len(seq.token_ids) > self.get(seq, math.inf)

    def discard(self, seq: Sequence) -> None:
        """A sequence is no suspect any more, if it was one."""
        if self.pop(seq, None) is not None and not self:
            self.num_unexplained += self._unexplained
            self._unexplained = False
