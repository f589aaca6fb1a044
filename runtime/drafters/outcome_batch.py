"""Reads a verifier's round as a `DraftBatch`."""

from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import Outcome, RoundHeader
from wingbeat.runtime.protocol.sampling_rules import SamplingRules

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


def batch_of(end: DrafterEnd, outcome: Outcome, device: torch.device) -> DraftBatch:
    """Read the outcome of one verifier; tensors that are on the drafter's device already are not copied.

    For a drafter on the CPU, decode columns are cut to the longest path of this round, and the growth rule is included.
    On other devices shapes stay fixed and the growth rule is left out, since evaluating the rule would synchronise.
    Sampling rules are included on every device.

    Args:
        device: the drafter's device.
    """
    on_cpu = device.type == "cpu"
    if on_cpu and outcome.committed_lens.device.type != "cpu":
        outcome = Outcome(*(field.cpu() for field in outcome))
    header = RoundHeader.read(outcome.header)
    decodes, proposals = slice(header.num_decodes), outcome.proposal_slots[: header.num_proposals]
    chunk_slots, chunk_positions, chunk_lens = (
        column[: header.num_chunks].tolist()
        for column in (outcome.chunk_slots, outcome.chunk_positions, outcome.chunk_lens)
    )
    width, chunk_tokens = None, slice(sum(chunk_lens))
    if on_cpu:
        width = int(outcome.decode_num_tokens[decodes].max()) if header.num_decodes else 1
    decode_slots, lens = outcome.decode_slots[decodes], outcome.committed_lens
    if lens.device.type == "cpu":
        busy = torch.cat([decode_slots, proposals, torch.tensor(chunk_slots, dtype=torch.int64)])
        longest = int(lens[busy].max()) if busy.numel() else 0
    else:  # the lengths on a GPU are not read, because reading them would synchronise
        longest = header.max_len or end.spec.max_model_len
    columns = {
        "decode_positions": outcome.decode_positions[decodes],
        "decode_num_tokens": outcome.decode_num_tokens[decodes],
        "decode_token_ids": outcome.decode_token_ids[decodes, :width],
        "decode_taps": outcome.decode_taps[decodes, :width],
        "chunk_next_token_ids": outcome.chunk_next_token_ids[chunk_tokens],
        "chunk_taps": outcome.chunk_taps[chunk_tokens],
        **{name: getattr(outcome, name) for name in SLOT_COLUMNS},
    }
    # Copies to the host must be synchronous, because the next operation reads the copies.
    how: dict[str, Any] = {"device": device, "non_blocking": not on_cpu}
    if outcome.decode_taps.device != device:
        columns = {name: column.to(**how) for name, column in columns.items()}
    rule = first_result("growth_rule", outcome, header) if on_cpu and header.num_proposals else None
    return DraftBatch(
        **columns,
        decode_slots=decode_slots,
        chunk_slots=chunk_slots,
        chunk_positions=chunk_positions,
        chunk_lens=chunk_lens,
        proposal_slots=proposals,
        token_ids=end.token_ids if end.token_ids.device == device else end.token_ids[:, :longest].to(**how),
        max_committed_len=longest,
        max_levels=(header.max_levels or None) if header.num_proposals else None,
        growth_rules=() if rule is None else ((slice(0, header.num_proposals), rule),),
        allowed_tokens=_masks(outcome, header, device) if header.has_masks else None,
        sampling_rules=SamplingRules(*(rows.to(**how) for rows in outcome.rules)) if header.sampling_rules else None,
        rule_kinds=header.sampling_rules,
        chunk_inputs=outcome.inputs(chunk_tokens.stop).to(**how) if header.has_inputs else None,
    )


def _masks(outcome: Outcome, header: RoundHeader, device: torch.device) -> Tensor:
    """Returns the masks of allowed tokens by proposal."""
    masks = outcome.allowed_tokens[: header.num_proposals]
    if device.type == "cpu":
        return masks
    # A copy from pageable memory would synchronise with the device.
    return torch.empty_like(masks, pin_memory=True).copy_(masks).to(device, non_blocking=True)
