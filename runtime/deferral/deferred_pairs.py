"""Pairs (taps, next token) that are kept back while no trees are requested, so that idle drafters cost little time."""

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.engine.outcome_writer import Advance, OutcomeWriter
from wingbeat.runtime.protocol.messages import AcceptedPaths, ChannelSpec
from wingbeat.runtime.protocol.transfer import copy_into, upload
from wingbeat.runtime.round.flight import RoundInFlight
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.sequence import Sequence

MOST_PAIRS = 32
"""Maximum number of deferred pairs per sequence; at this size, an idle drafter adds almost no time to a plain round."""


class DeferredPairs:
    """Buffers of pairs kept back while no trees are requested, so that the drafter gets one message for many rounds.

    A pair is the taps at a position and the token after that position. A round's pairs can be kept back if the host can
    count the round's tokens: if all its trees are bare roots, or if the round is settled. Each slot has one row of
    buffers, of which the first `DraftProgress.num_deferred` pairs are valid.

    Args:
        spec: shapes of the channel; deferred pairs of all slots together fit into one round of that channel.
    """

    def __init__(self, spec: ChannelSpec, slots: SlotState) -> None:
        self.capacity = min(MOST_PAIRS, spec.max_prefill_tokens // spec.num_slots)
        shape = (spec.num_slots, self.capacity)
        self._taps = slots.block_tables.new_zeros(*shape, spec.taps_size, dtype=spec.taps_dtype)
        self._token_ids = slots.block_tables.new_zeros(shape)
        self._on_host = None
        if slots.device.type == "cpu":
            self._on_host = (as_numbers(self._taps), self._token_ids.numpy())

    def add(self, seqs: list[Sequence], flight: RoundInFlight, index: Tensor | slice) -> bool:
        """Stores a round's pairs of some of its decodes.

        Args:
            index: rows of `seqs` among the decodes, on the device.

        Returns:
            False, having stored nothing, if the host cannot count the pairs or the pairs do not fit into the buffers.
        """
        paths, rows = flight.decodes, {id(seq): row for row, seq in enumerate(flight.plan.decodes)}
        bare = paths.nodes.shape[1] == 1 and all(seq.min_len == seq.max_len for seq in seqs)
        counts = [flight.num_new_tokens(rows[id(seq)]) for seq in seqs]
        fit = all(seq.draft.num_deferred + n <= self.capacity for seq, n in zip(seqs, counts, strict=True))
        if not (bare or flight.result is not None) or not fit:
            return False
        for seq in seqs:
            if not seq.draft.num_deferred:
                # `min_len` already counts this round's token; the root is at the position before that token.
                seq.draft.deferred_from = seq.min_len - 2
        columns = [seq.draft.num_deferred for seq in seqs]
        if max(counts) > 1:
            self._add_paths(seqs, paths, index, counts)
        elif self._on_host is None:
            slots, column = paths.slots[index], upload(columns, paths.slots.device)
            if paths.taps is not None:
                self._taps[slots, column] = paths.taps[index, 0]
            self._token_ids[slots, column] = paths.token_ids[index, 0]
        else:
            rows = [seq.slot for seq in seqs]
            if paths.taps is not None:
                self._on_host[0][rows, columns] = as_numbers(paths.taps[:, 0][index].to(self._taps.dtype))
            self._on_host[1][rows, columns] = paths.token_ids[:, 0][index].numpy()
        for seq, count in zip(seqs, counts, strict=True):
            seq.draft.num_deferred += count
        return True

    def _add_paths(self, seqs: list[Sequence], paths: AcceptedPaths, index: Tensor | slice, counts: list[int]) -> None:
        """Stores the pairs of a round in which a sequence emitted several tokens."""
        row = np.repeat(np.arange(len(seqs)), counts)
        step = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots, begins = np.array([[seq.slot, seq.draft.num_deferred] for seq in seqs]).T
        places = np.stack([row, step, slots[row], begins[row] + step]).tolist()
        row, step, slot, column = upload(places, paths.slots.device).unbind()
        if paths.taps is not None:
            self._taps[slot, column] = paths.taps[index][row, step].to(self._taps.dtype)
        self._token_ids[slot, column] = paths.token_ids[index][row, step]

    def hand_over(self, seqs: list[Sequence], writer: OutcomeWriter, advance: Advance) -> None:
        """Adds the sequences' pairs to an outcome, in order, and clears the pairs."""
        for seq in seqs:
            draft = seq.draft
            if not draft.num_deferred:
                continue
            if writer.num_chunk_tokens + draft.num_deferred > writer.capacity:
                # Prompts filled the buffers, so the pairs are replayed later.
                draft.num_deferred, draft.complete = 0, False
                continue
            end = draft.deferred_from + draft.num_deferred
            spans = seq.request.spans
            taps, next_token_ids = writer.add_chunk(seq.slot, draft.deferred_from, draft.num_deferred, spans)
            copy_into(taps, self._taps[seq.slot, : draft.num_deferred])
            copy_into(next_token_ids, self._token_ids[seq.slot, : draft.num_deferred])
            draft.num_deferred = 0
            advance(seq, end)


def as_numbers(tensor: Tensor) -> np.ndarray:
    """Returns a numpy view of a host tensor, because numpy assigns faster than torch; bfloat16 is viewed as int16."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
