"""Interface for draft trees built from earlier text in the engine's process, beside the drafter's trees."""

from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver
from wingbeat.runtime.scheduling.sequence import Sequence


class TextDrafts(RoundObserver):
    """Chooses per sequence and round whether the next tree comes from text; this base always uses the drafter.

    `choose` runs after a round is settled and before the drafter is notified, so no round may be in flight then.
    """

    def choose(self, seqs: list[Sequence], flight: RoundInFlight) -> bool:
        """Sets `DraftProgress.text_tree` of sequences whose next tree comes from text; the caller has set it to None.

        Args:
            seqs: sequences that may be drafted for, by the drafter or from text.
            flight: the settled round; its sequences do not contain its tokens yet.

        Returns:
            Whether to ask the drafter for trees of the other sequences.
        """
        return True
