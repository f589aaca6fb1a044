"""Which tokens grammars allow behind the roots of the trees that are asked for: told to the drafter with the round."""

from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.round import RoundInFlight


def write_root_masks(outcome: Outcome, asked: list[Sequence], flight: RoundInFlight) -> int:
    """Fill `Outcome.allowed_tokens`, unless no grammar says anything or the host does not know the roots yet.

    Args:
        asked: sequences that a tree is asked for, in the order of the proposals.

    Returns:
        What the header says of them: 1, or 0 where they are not to be read.
    """
    rows, has_masks = outcome.allowed_tokens, False
    if flight.result is None or not rows.shape[1] or all(seq.masker is None for seq in asked):
        return 0
    masks, tokens = rows.numpy(), flight.tokens_by_slot()
    for mask, seq in zip(masks, asked, strict=False):
        if seq.masker is not None and seq.masker.ahead(tokens[seq.slot], mask):
            has_masks = True
        else:
            mask[:] = -1
    return int(has_masks)
