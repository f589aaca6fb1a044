"""Trees made of earlier text in an engine's own process, beside those of its drafter: what chooses between the two."""

from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver
from wingbeat.runtime.scheduling.sequence import Sequence


class TextDrafts(RoundObserver):
    """Decides, for each sequence and round, who makes the next tree; as the class stands here, the drafter always.

    It is asked once a round is decided and before the drafter is told of it, so that no round may be in flight then.
    """

    def choose(self, seqs: list[Sequence], flight: RoundInFlight) -> bool:
        """Set `DraftProgress.text_tree` of the sequences whose next tree is made of text; it is None for all of them.

        Args:
            seqs: those that may be drafted for, by the drafter or from text.
            flight: the round that is decided; its sequences do not have its tokens yet.

        Returns:
            Whether the drafter is asked for the others.
        """
        return True
