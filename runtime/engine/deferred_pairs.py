"""Pairs of plain rounds, kept back for the drafter: while nobody asks for trees it is rung once in many rounds.

A pair is the taps at a position and the token after it. Only rounds of bare roots are kept back: they emit one token
each, so the host knows every position without having seen a token.
"""

from torch import Tensor

from wingbeat.runtime.protocol.messages import AcceptedPaths, ChannelSpec
from wingbeat.runtime.protocol.transfer import copy_into, upload
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.slots import SlotState

MOST_PAIRS = 32
"""Per sequence: enough that a drafter costs a plain round next to nothing."""


class DeferredPairs:
    """Buffers by slot; `DraftProgress.num_deferred` says how many count.

    Args:
        spec: of the channel they will go through; all sequences' pairs together fit into one of its rounds.
    """

    def __init__(self, spec: ChannelSpec, slots: SlotState) -> None:
        self.capacity = min(MOST_PAIRS, spec.max_prefill_tokens // spec.num_slots)
        shape = (spec.num_slots, self.capacity)
        self._taps = slots.block_tables.new_zeros(*shape, spec.taps_size, dtype=spec.taps_dtype)
        self._token_ids = slots.block_tables.new_zeros(shape)

    def has_room(self, seqs: list[Sequence]) -> bool:
        """Whether one more pair of each fits."""
        return all(seq.draft.num_deferred < self.capacity for seq in seqs)

    def add(self, seqs: list[Sequence], paths: AcceptedPaths, index: Tensor | slice) -> None:
        """Keep the pairs of a round of bare roots.

        Args:
            index: rows of `paths` that belong to `seqs`.
        """
        for seq in seqs:
            if not seq.draft.num_deferred:
                # The round itself is counted already: its root stands before the token it emits.
                seq.draft.deferred_from = seq.min_len - 2
        slots, column = paths.slots[index], upload([seq.draft.num_deferred for seq in seqs], paths.slots.device)
        if paths.taps is not None:
            self._taps[slots, column] = paths.taps[index, 0]
        self._token_ids[slots, column] = paths.token_ids[index, 0]
        for seq in seqs:
            seq.draft.num_deferred += 1

    def hand_over(self, seq: Sequence, taps: Tensor, next_token_ids: Tensor) -> None:
        """Copy a sequence's pairs out, in order, and forget them.

        Args:
            taps: [num_deferred, taps_size]
            next_token_ids: int64 [num_deferred]
        """
        copy_into(taps, self._taps[seq.slot, : seq.draft.num_deferred])
        copy_into(next_token_ids, self._token_ids[seq.slot, : seq.draft.num_deferred])
        seq.draft.num_deferred = 0
