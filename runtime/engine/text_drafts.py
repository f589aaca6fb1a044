"""Interface for draft trees that the engine's process builds from earlier text, in addition to the drafter's trees."""

from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver
from wingbeat.runtime.scheduling.sequence import Sequence


class TextDrafts(RoundObserver):
    """Chooses for each sequence and round whether the next tree comes from text. This base class never chooses text.

    `choose` runs after a round's tokens arrived on the host and before the drafter is notified, so the engine must not
    overlap rounds.
    """

    def choose(self, seqs: list[Sequence], flight: RoundInFlight) -> bool:
        """Sets `DraftProgress.text_tree` of the sequences whose next tree comes from text.

        The caller has set `text_tree` of all `seqs` to None.

        Args:
            seqs: sequences that may be drafted for, by the drafter or from text.
            flight: the round whose tokens have arrived; its sequences do not contain these tokens yet.

        Returns:
            Whether to ask the drafter for trees of the other sequences.
        """
        return True
