"""Sequences suspected of making a round raise or an engine die: each runs alone until it is past the failed round."""

import math

from wingbeat.runtime.scheduling.sequence import Sequence

MAX_UNEXPLAINED = 3
"""Rounds that may raise although each of their sequences passes alone, before the engine itself counts as failed."""
FORGOTTEN_AFTER = 1000
"""Successful rounds in a row after which one unexplained round is forgotten."""


class Suspects(dict[Sequence, float]):
    """Suspected sequences, with the number of tokens beyond which each is past the failed round.

    Suspects are the sequences of a round that raised, until the cause is found, and sequences under which engines died.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_unexplained = 0
        """Rounds that raised, are not forgotten, and whose sequences all passed alone."""
        self._unexplained = False
        """Whether a round has raised and none of its suspects has raised alone so far."""
        self._num_good_rounds = 0

    def add(self, seq: Sequence, passed_at: float = math.inf) -> None:
        """Marks a sequence to run alone until it has more than `passed_at` tokens."""
        self[seq] = passed_at

    def round_raised(self, drafted: bool) -> None:
        """Records a round that raised.

        Args:
            drafted: see `Scheduler.restart`; a drafter explains the exception if no sequence does.

        Raises:
            RuntimeError: too many rounds raised that no sequence explains.
        """
        if self.num_unexplained == MAX_UNEXPLAINED and not drafted:
            raise RuntimeError(
                f"{MAX_UNEXPLAINED} rounds raised an exception, but each of their sequences ran alone without one"
            )
        self._unexplained |= not drafted
        self._num_good_rounds = 0

    def round_went_well(self) -> None:
        """Records a successful round; enough of them offset one that raised. Rounds of suspects alone do not count."""
        if self:
            return
        self._num_good_rounds += 1
        if self._num_good_rounds == FORGOTTEN_AFTER:
            self._num_good_rounds = 0
            self.num_unexplained -= 1

    def failed(self, seq: Sequence) -> None:
        """Records that a sequence raised alone; if it is a suspect, it explains the failed round."""
        self._unexplained &= seq not in self

    def is_past(self, seq: Sequence) -> bool:
        """Whether a suspect is past the round that raised."""
        return len(seq.token_ids) > self.get(seq, math.inf)

    def discard(self, seq: Sequence) -> None:
        """Clears a sequence of suspicion."""
        if self.pop(seq, None) is not None and not self:
            self.num_unexplained += self._unexplained
            self._unexplained = False
