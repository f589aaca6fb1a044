"""Joins the batches of several verifiers into one `DraftBatch`, with slots and block ids offset per verifier."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from wingbeat.runtime.drafters.base import DraftBatch, GrowthRule
from wingbeat.runtime.drafters.outcome_batch import SLOT_COLUMNS
from wingbeat.runtime.protocol.chunk_inputs import ChunkInputs
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.sampling_rules import SamplingRules, no_rules

_ROWS = (
    *("decode_positions", "decode_num_tokens", "decode_token_ids", "decode_taps", "chunk_next_token_ids"),
    "chunk_taps",
)
"""Names of the `DraftBatch` fields that are concatenated unchanged."""


class Attachment(NamedTuple):
    """An attached verifier and the start of its slot range and block range."""

    end: DrafterEnd
    slot_offset: int
    block_offset: int

    @property
    def slots(self) -> slice:
        """Range of the verifier's slots."""
        return slice(self.slot_offset, self.slot_offset + self.end.spec.num_slots)


Batches = list[tuple[Attachment, DraftBatch]]


def join(batches: Batches, attached: list[Attachment]) -> DraftBatch:
    """Concatenate the rows of several verifiers' batches, and copy the slot tables to the verifiers' slots.

    Args:
        batches: verifiers with a round to answer, and their batches.
        attached: all attached verifiers.
    """
    num_slots = max(a.slots.stop for a in attached)
    parts = [batch for _, batch in batches]
    longest = max(batch.max_committed_len for batch in parts)
    widths = {"block_tables": max(a.end.spec.max_blocks_per_seq for a in attached), "token_ids": longest}
    rule_kinds = 0
    for batch in parts:
        rule_kinds |= batch.rule_kinds
    return DraftBatch(
        **{name: _concatenated([getattr(batch, name) for batch in parts]) for name in _ROWS},
        **{name: _by_slot(batches, name, num_slots, widths.get(name)) for name in (*SLOT_COLUMNS, "token_ids")},
        decode_slots=torch.cat([batch.decode_slots + a.slot_offset for a, batch in batches]),
        proposal_slots=torch.cat([batch.proposal_slots + a.slot_offset for a, batch in batches]),
        chunk_slots=[slot + a.slot_offset for a, batch in batches for slot in batch.chunk_slots],
        chunk_positions=[position for batch in parts for position in batch.chunk_positions],
        chunk_lens=[length for batch in parts for length in batch.chunk_lens],
        max_committed_len=longest,
        max_levels=max(batch.max_levels or 0 for batch in parts) or None,
        growth_rules=_growth_rules(parts),
        allowed_tokens=_allowed_tokens(parts),
        sampling_rules=_sampling_rules(batches, num_slots),
        rule_kinds=rule_kinds,
        chunk_inputs=_chunk_inputs(parts),
    )


def _concatenated(parts: list[Tensor]) -> Tensor:
    """Concatenates rows; the columns of shorter rows are padded with zeros."""
    widths = [part.shape[1:2].numel() for part in parts]
    missing = [max(widths) - width for width in widths]
    if any(missing):
        after = (0, 0) * (parts[0].dim() - 2)
        parts = [functional.pad(part, (*after, 0, columns)) for part, columns in zip(parts, missing, strict=True)]
    return torch.cat(parts)


def _by_slot(batches: Batches, name: str, num_slots: int, width: int | None) -> Tensor:
    """Returns a slot table over all verifiers' slots; rows of verifiers without a batch are zero.

    Args:
        width: number of columns; None if the table has no columns.
    """
    first = getattr(batches[0][1], name)
    table = first.new_zeros((num_slots,) if width is None else (num_slots, width))
    for attachment, batch in batches:
        rows, value = table[attachment.slots], getattr(batch, name)[: attachment.end.spec.num_slots]
        if name == "block_tables":
            value = value + attachment.block_offset
        if width is not None:
            value = value[:, :width]
            rows = rows[:, : value.shape[1]]
        rows.copy_(value)
    return table


def _growth_rules(batches: list[DraftBatch]) -> tuple[tuple[slice, GrowthRule], ...]:
    """Returns each verifier's range of proposals and its growth rule; empty if any verifier has no rule."""
    rules, start = [], 0
    for batch in batches:
        stop = start + len(batch.proposal_slots)
        if stop > start and not batch.growth_rules:
            return ()
        rules += [(slice(start, stop), rule) for _, rule in batch.growth_rules]
        start = stop
    return tuple(rules)


def _allowed_tokens(batches: list[DraftBatch]) -> Tensor | None:
    """Returns the masks of allowed tokens by proposal; rows of verifiers without masks allow all tokens."""
    masks = [batch.allowed_tokens for batch in batches if batch.allowed_tokens is not None]
    if not masks:
        return None
    width = max(mask.shape[1] for mask in masks)
    joined = masks[0].new_full((sum(len(batch.proposal_slots) for batch in batches), width), -1)
    begin = 0
    for batch in batches:
        end = begin + len(batch.proposal_slots)
        if batch.allowed_tokens is not None:
            joined[begin:end] = batch.allowed_tokens
        begin = end
    return joined


def _sampling_rules(batches: Batches, num_slots: int) -> SamplingRules | None:
    """Returns sampling rules by slot; slots of verifiers without rules get rows without effect."""
    if all(batch.sampling_rules is None for _, batch in batches):
        return None
    joined = no_rules(num_slots, batches[0][1].committed_lens.device)
    for attachment, batch in batches:
        for into, rows in zip(joined, batch.sampling_rules or (), strict=False):
            into[attachment.slots] = rows
    return joined


def _chunk_inputs(batches: list[DraftBatch]) -> ChunkInputs | None:
    """Returns the inputs of all chunks; None if no verifier sent inputs."""
    told = [batch.chunk_inputs for batch in batches if batch.chunk_inputs is not None]
    if not told:
        return None
    num_axes = max(one.axes.shape[1] for one in told)
    widest = max((one.embeddings for one in told), key=lambda embeddings: embeddings.shape[1])
    filled = [_filled(batch.chunk_inputs, _rotations(batch), num_axes, widest) for batch in batches]
    return ChunkInputs(*(torch.cat(columns) for columns in zip(*filled, strict=True)))


def _rotations(batch: DraftBatch) -> Tensor:
    """Returns RoPE positions of the chunks' pairs, int64 [num_chunk_tokens].

    All pairs are treated as text after the last media span.
    """
    deltas, device = batch.position_deltas, batch.committed_lens.device
    chunks = zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True)
    return torch.cat(
        [torch.arange(0, device=device)]
        + [torch.arange(first, first + length, device=device) + deltas[slot] for slot, first, length in chunks]
    )


def _filled(told: ChunkInputs | None, positions: Tensor, num_axes: int, like: Tensor) -> ChunkInputs:
    """Returns the inputs of a part, extended to the columns of the widest part."""
    count = len(positions)
    axes = positions[:, None].expand(count, num_axes)
    shown, embeddings = positions.new_zeros(count), like.new_zeros(count, like.shape[1])
    if told is None:
        return ChunkInputs(axes, shown, embeddings)
    if not told.axes.shape[1]:
        told = told._replace(axes=axes)
    return told if len(told.shown) == count else told._replace(shown=shown, embeddings=embeddings)
