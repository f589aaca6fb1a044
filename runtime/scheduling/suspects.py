"""Sequences suspected of making a round raise or an engine die.

Each such sequence runs alone until the sequence has more tokens than at the failure.
"""

import math

from wingbeat.runtime.scheduling.sequence import Sequence

MAX_UNEXPLAINED = 3
"""Number of unexplained rounds at which the engine counts as broken. A round is unexplained if the round raised an
exception, but each of its sequences later ran alone without an exception.
"""
FORGOTTEN_AFTER = 1000
"""Number of successful rounds in a row after which one unexplained round is no longer counted."""


class Suspects(dict[Sequence, float]):
    """Suspected sequences; each value is the number of tokens beyond which the sequence is past the failed round.

    Suspects are the sequences of a round that raised, and sequences that ran when earlier engines died.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_unexplained = 0
        """Number of unexplained rounds so far, see `MAX_UNEXPLAINED`; reduced by successful rounds."""
        self._unexplained = False
        """Whether a round has raised an exception that no sequence has raised so far while running alone."""
        self._num_good_rounds = 0

    def add(self, seq: Sequence, passed_at: float = math.inf) -> None:
        """Marks a sequence as suspect, so that it runs alone until it has more than `passed_at` tokens."""
        self[seq] = passed_at

    def round_raised(self, drafted: bool) -> None:
        """Records a round that raised.

        Args:
            drafted: whether a drafter was attached, which then counts as the cause if no sequence raises alone.

        Raises:
            RuntimeError: too many rounds raised although none of their sequences raised alone.
        """
        if self.num_unexplained == MAX_UNEXPLAINED and not drafted:
            raise RuntimeError(
                f"{MAX_UNEXPLAINED} rounds raised an exception, but each of their sequences ran alone without one"
            )
        self._unexplained |= not drafted
        self._num_good_rounds = 0

    def round_went_well(self) -> None:
        """Records a successful round, unless there are suspects.

        After `FORGOTTEN_AFTER` successful rounds, one unexplained round is no longer counted.
        """
        if self:
            return
        self._num_good_rounds += 1
        if self._num_good_rounds == FORGOTTEN_AFTER:
            self._num_good_rounds = 0
            self.num_unexplained -= 1

    def failed(self, seq: Sequence) -> None:
        """Records that a sequence raised while running alone.

        If the sequence is a suspect, the failed round is explained.
        """
        self._unexplained &= seq not in self

    def is_past(self, seq: Sequence) -> bool:
        """Whether a suspect has more tokens than the failed round could have reached."""
        return len(seq.token_ids) > self.get(seq, math.inf)

    def discard(self, seq: Sequence) -> None:
        """Removes a sequence from the suspects.

        When no suspect is left and none has raised alone, the failed round is counted as unexplained.
        """
        if self.pop(seq, None) is not None and not self:
            self.num_unexplained += self._unexplained
            self._unexplained = False
