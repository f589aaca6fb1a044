"""Merges the rounds of several verifiers into one `DraftBatch`, with slots and block ids offset per verifier."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.drafters.base import DraftBatch, GrowthRule
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.chunk_inputs import ChunkInputs, joined
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import Outcome, RoundHeader
from wingbeat.runtime.protocol.sampling_rules import SamplingRules, no_rules

HOST_COLUMNS = ("decode_slots", "proposal_slots")
"""Names of the `DraftBatch` fields that stay in host memory."""

SLOT_COLUMNS = (
    "epochs",
    "committed_lens",
    "block_tables",
    "temperatures",
    "seeds",
    "last_token_ids",
    "position_deltas",
)
"""Names of the `DraftBatch` fields that an outcome holds by slot."""


@dataclass
class Attachment:
    """An attached verifier and the start of its slot range and block range."""

    end: DrafterEnd
    slot_offset: int
    block_offset: int


def _moved(columns: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Moves columns to the drafter's device, except HOST_COLUMNS, which stay in host memory."""
    # Copies to the host must be synchronous, because the next operation reads the copies.
    no_wait = device.type != "cpu"
    return {k: v if k in HOST_COLUMNS else v.to(device, non_blocking=no_wait) for k, v in columns.items()}


def merge(pending: list[tuple[Attachment, Outcome]], attached: list[Attachment], device: torch.device) -> DraftBatch:
    """Concatenate the outcomes of several verifiers.

    The outcome of a single verifier on the drafter's device is not copied.

    For a drafter on the CPU, decode columns are cut to the longest path of this round, and growth rules are included.
    On other devices shapes stay fixed and growth rules are left out, since evaluating the rules would synchronise.
    Sampling rules are included on every device.

    Args:
        pending: verifiers with a round to answer, and their outcomes.
        attached: all attached verifiers.
        device: the drafter's device.
    """
    on_cpu = device.type == "cpu"
    rounds = [_Asked(a, _on_host(o) if on_cpu else o, RoundHeader.read(o.header)) for a, o in pending]
    width = max(each.longest_path() for each in rounds) if on_cpu else None
    parts = [each.rows(width, device) for each in rounds]
    rows = parts[0] if len(parts) == 1 else {k: torch.cat([part[k] for part in parts]) for k in parts[0]}
    chunk_slots = [slot for each in rounds for slot in each.chunk_slots()]
    if len(attached) == 1 and attached[0].slot_offset == 0 and attached[0].block_offset == 0:
        by_slot = {name: getattr(rounds[0].outcome, name) for name in SLOT_COLUMNS}
        longest = _longest(rounds, by_slot["committed_lens"], rows, chunk_slots)
        if by_slot["committed_lens"].device != device:
            by_slot = _moved(by_slot, device)
        history = attached[0].end.token_ids
        here = history.device == device
        by_slot["token_ids"] = history if here else _moved({"": history[:, :longest]}, device)[""]
    else:
        by_slot = _by_slot(rounds, attached, device)
        longest = _longest(rounds, by_slot["committed_lens"], rows, chunk_slots)
        by_slot["token_ids"] = _history(rounds, attached, longest, device)
    rule_kinds = has_masks = 0
    for each in rounds:
        rule_kinds |= each.header.sampling_rules
        has_masks |= each.header.has_masks
    return DraftBatch(
        **rows,
        **by_slot,
        chunk_slots=chunk_slots,
        chunk_positions=[position for each in rounds for position in each.chunk_positions()],
        chunk_lens=[length for each in rounds for length in each.chunk_lens()],
        max_committed_len=longest,
        max_levels=max(each.header.max_levels * (each.header.num_proposals > 0) for each in rounds) or None,
        growth_rules=_growth_rules(rounds) if on_cpu else (),
        allowed_tokens=_allowed_tokens(rounds, device) if has_masks else None,
        sampling_rules=_sampling_rules(rounds, attached, device) if rule_kinds else None,
        rule_kinds=rule_kinds,
        chunk_inputs=_chunk_inputs(rounds, device),
    )


class _Asked(NamedTuple):
    """The round of one verifier. A pass answers the rounds of several verifiers."""

    attachment: Attachment
    outcome: Outcome
    header: RoundHeader

    def longest_path(self) -> int:
        count = self.header.num_decodes
        return int(self.outcome.decode_num_tokens[:count].max()) if count else 1

    def chunk_slots(self) -> list[int]:
        return (self.outcome.chunk_slots[: self.header.num_chunks] + self.attachment.slot_offset).tolist()

    def chunk_positions(self) -> list[int]:
        return self.outcome.chunk_positions[: self.header.num_chunks].tolist()

    def chunk_lens(self) -> list[int]:
        return self.outcome.chunk_lens[: self.header.num_chunks].tolist()

    def inputs(self, device: torch.device) -> ChunkInputs | None:
        """Returns the inputs of the chunks, on `device`; None if the verifier sent no inputs."""
        told = self.outcome.inputs(sum(self.chunk_lens())) if self.header.has_inputs else None
        return None if told is None else told.to(device, non_blocking=device.type != "cpu")

    def rotations(self, device: torch.device) -> Tensor:
        """Returns RoPE positions of the chunks' pairs, int64 [num_chunk_tokens].

        All pairs are treated as text after the last media span.
        """
        slots = self.outcome.chunk_slots[: self.header.num_chunks].tolist()
        chunks = zip(slots, self.chunk_positions(), self.chunk_lens(), strict=True)
        deltas = self.outcome.position_deltas.to(device)
        return torch.cat(
            [torch.arange(0, device=device)]
            + [torch.arange(first, first + length, device=device) + deltas[slot] for slot, first, length in chunks]
        )

    def rows(self, width: int | None, device: torch.device) -> dict[str, Tensor]:
        """Returns the rows in use of the decode, chunk-token and proposal columns, with the drafter's slot numbers.

        Args:
            width: number of path columns to keep for decodes; None keeps all columns.
            device: the drafter's device.
        """
        outcome, offset = self.outcome, self.attachment.slot_offset
        num_decodes, num_chunk_tokens = self.header.num_decodes, sum(self.chunk_lens())
        rows = {
            "decode_slots": outcome.decode_slots[:num_decodes] + offset,
            "decode_positions": outcome.decode_positions[:num_decodes],
            "decode_num_tokens": outcome.decode_num_tokens[:num_decodes],
            "decode_token_ids": outcome.decode_token_ids[:num_decodes, :width],
            "decode_taps": outcome.decode_taps[:num_decodes, :width],
            "chunk_next_token_ids": outcome.chunk_next_token_ids[:num_chunk_tokens],
            "chunk_taps": outcome.chunk_taps[:num_chunk_tokens],
            "proposal_slots": outcome.proposal_slots[: self.header.num_proposals] + offset,
        }
        return rows if outcome.decode_taps.device == device else _moved(rows, device)


def _growth_rules(rounds: list[_Asked]) -> tuple[tuple[slice, GrowthRule], ...]:
    """Returns each verifier's range of proposals and its growth rule; empty if any verifier has no rule."""
    rules: list[tuple[slice, GrowthRule | None]] = []
    start = 0
    for _, outcome, header in rounds:
        if header.num_proposals:
            proposed = slice(start, start + header.num_proposals)
            rules.append((proposed, first_result("growth_rule", outcome, header)))
            start = proposed.stop
    return tuple(rules) if all(rule is not None for _, rule in rules) else ()


def _allowed_tokens(rounds: list[_Asked], device: torch.device) -> Tensor:
    """Returns the masks of allowed tokens by proposal; rows of verifiers without masks allow all tokens."""
    width = max(outcome.allowed_tokens.shape[1] for _, outcome, _ in rounds)
    shape = sum(header.num_proposals for _, _, header in rounds), width
    # The masks are in pinned memory, because a copy from pageable memory would synchronise with the device.
    masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type != "cpu")
    begin = 0
    for _, outcome, header in rounds:
        if header.has_masks:
            masks[begin : begin + header.num_proposals] = outcome.allowed_tokens[: header.num_proposals]
        begin += header.num_proposals
    return masks.to(device, non_blocking=device.type != "cpu")


def _chunk_inputs(rounds: list[_Asked], device: torch.device) -> ChunkInputs | None:
    """Returns the inputs of all chunks, on the drafter's device; None if no verifier sent inputs."""
    if not any(each.header.has_inputs for each in rounds):
        return None
    return joined([(each.inputs(device), each.rotations(device)) for each in rounds])


def _sampling_rules(rounds: list[_Asked], attached: list[Attachment], device: torch.device) -> SamplingRules:
    """Returns sampling rules by slot, on the drafter's device.

    Slots of verifiers without rules get rows without effect.
    """
    if len(attached) == 1 and attached[0].slot_offset == 0:
        return SamplingRules(*(rows.to(device, non_blocking=True) for rows in rounds[0].outcome.rules))
    num_slots = max(a.slot_offset + a.end.spec.num_slots for a in attached)
    merged = no_rules(num_slots, device)
    for attachment, outcome, header in rounds:
        if header.sampling_rules:
            own = slice(attachment.slot_offset, attachment.slot_offset + attachment.end.spec.num_slots)
            for into, rows in zip(merged, outcome.rules, strict=True):
                into[own] = rows
    return merged


def _on_host(outcome: Outcome) -> Outcome:
    """Returns the outcome itself if its channel is in host memory; otherwise a synchronous copy in host memory."""
    if outcome.committed_lens.device.type == "cpu":
        return outcome
    return Outcome(*(field.cpu() for field in outcome))


def _longest(rounds: list[_Asked], committed_lens: Tensor, rows: dict[str, Tensor], chunk_slots: list[int]) -> int:
    """Returns the length of a pass's longest sequence.

    If lengths are on a GPU, returns the largest of the verifiers' upper bounds.
    """
    if committed_lens.device.type != "cpu":
        return max(each.header.max_len or each.attachment.end.spec.max_model_len for each in rounds)
    busy = torch.cat([rows["decode_slots"], rows["proposal_slots"], torch.tensor(chunk_slots, dtype=torch.int64)])
    return int(committed_lens[busy].max()) if busy.numel() else 0


def _by_slot(rounds: list[_Asked], attached: list[Attachment], device: torch.device) -> dict[str, Tensor]:
    """Returns slot tables over all verifiers' slot ranges; rows of verifiers without a pending round are zero."""
    num_slots = max(a.slot_offset + a.end.spec.num_slots for a in attached)
    num_blocks = max(a.end.spec.max_blocks_per_seq for a in attached)
    tables: dict[str, Tensor] = {}
    for attachment, outcome, _ in rounds:
        moved = outcome._replace(block_tables=outcome.block_tables + attachment.block_offset)
        for name in SLOT_COLUMNS:
            _place(tables, name, getattr(moved, name), attachment, (num_slots, num_blocks), device)
    return tables


def _history(rounds: list[_Asked], attached: list[Attachment], longest: int, device: torch.device) -> Tensor:
    """Returns the token histories of all verifiers' slots, cut to the longest sequence of this pass."""
    num_slots = max(a.slot_offset + a.end.spec.num_slots for a in attached)
    tables: dict[str, Tensor] = {}
    for attachment, _, _ in rounds:
        _place(tables, "token_ids", attachment.end.token_ids[:, :longest], attachment, (num_slots, longest), device)
    return tables["token_ids"]


def _place(
    tables: dict[str, Tensor],
    name: str,
    value: Tensor,
    attachment: Attachment,
    shape: tuple[int, int],
    device: torch.device,
) -> None:
    """Copies a verifier's rows of one table into the verifier's slot range.

    The copied rows may be shorter than the table's rows.

    Args:
        tables: merged tables by name; a missing table is created.
        shape: total number of slots, and number of columns if the table has columns.
    """
    if name not in tables:
        tables[name] = value.new_zeros(shape[: value.dim()], device=device)
    rows = tables[name][attachment.slot_offset : attachment.slot_offset + attachment.end.spec.num_slots]
    (rows[:, : value.shape[1]] if value.dim() == 2 else rows).copy_(value)
