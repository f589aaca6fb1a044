"""Logit processors applied before temperature, as tensors: bias, penalties, grammar. Torch reference.

This file contains nothing about requests or trees. On a GPU `scores` applies the same steps tile by tile.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Penalties(NamedTuple):
    """Penalties on tokens in a row's history.

    Repetition divides positive logits and multiplies the others, for tokens of the prompt or the output (transformers'
    RepetitionPenaltyLogitsProcessor; CTRL, arXiv:1909.05858). Then frequency is subtracted per occurrence and presence
    once, for tokens of the output (definition of OpenAI and vLLM).
    """

    repetition: Tensor
    """float32 [num_rows], above 0; 1 is off."""
    presence: Tensor
    """float32 [num_rows]; 0 is off."""
    frequency: Tensor
    """float32 [num_rows]; 0 is off."""
    slots: Tensor
    """int64 [num_rows]: slot of each row in the two tables below; -1 means no penalties."""
    prompt_mask: Tensor
    """bool [num_slots, vocab_size]: the token occurs in the prompt."""
    output_counts: Tensor
    """int32 [num_slots, vocab_size]: occurrences in the output so far."""
    path_token_ids: Tensor | None = None
    """int64 [num_rows, max_path]: tokens that follow the slot's history for this row alone; -1 is padding.

    For a tree node: its path below the root, itself included (`tree.path_token_ids`).
    """


class Histories(NamedTuple):
    """Token histories of all slots, and the slot of each row of a batch."""

    token_ids: Tensor
    """int64 [num_slots, width]: the prompt comes first; tokens at indices `lens` and above are ignored."""
    lens: Tensor
    """int64 [num_slots]; may exceed the width."""
    num_prompt_tokens: Tensor
    """float32 [num_slots]: number of prompt tokens."""
    slots: Tensor
    """int64 [num_rows]: slot of each row."""


class LogitBias(NamedTuple):
    """Values added to logits before penalties."""

    table: Tensor
    """float32 [num_tables, vocab_size]"""
    rows: Tensor
    """int64 [num_rows]: row of the table; -1 means no bias."""


class LogitProcessors(NamedTuple):
    """Logit processors, applied in this order: bias, penalties, grammar."""

    penalties: Penalties | None = None
    logit_bias: LogitBias | None = None
    grammar_mask: Tensor | None = None
    """int32 [num_rows, ceil(vocab_size / 32)]: bit b of word w allows token 32 * w + b (llguidance's token mask)."""


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
    fits = tensor.dim() == len(shape) and all(want in (None, n) for want, n in zip(shape, tensor.shape, strict=False))
    if not fits or tensor.dtype != dtype:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: it must be {dtype} [{wanted}]")


def check_processors(processors: LogitProcessors, num_rows: int, vocab_size: int) -> None:
    """Rejects tensors without the documented shape and dtype; does not read their values.

    Raises:
        ValueError: the message names the field, its shape and dtype, and the required shape and dtype.
    """
    penalties, bias, grammar_mask = processors
    if penalties is not None:
        for name in ("repetition", "presence", "frequency"):
            _check_shape(f"penalties.{name}", getattr(penalties, name), (num_rows,), torch.float32)
        _check_shape("penalties.slots", penalties.slots, (num_rows,), torch.int64)
        _check_shape("penalties.prompt_mask", penalties.prompt_mask, (None, vocab_size), torch.bool)
        num_slots = penalties.prompt_mask.shape[0]
        _check_shape("penalties.output_counts", penalties.output_counts, (num_slots, vocab_size), torch.int32)
        if penalties.path_token_ids is not None:
            _check_shape("penalties.path_token_ids", penalties.path_token_ids, (num_rows, None), torch.int64)
    if bias is not None:
        _check_shape("logit_bias.table", bias.table, (None, vocab_size), torch.float32)
        _check_shape("logit_bias.rows", bias.rows, (num_rows,), torch.int64)
    if grammar_mask is not None:
        _check_shape("grammar_mask", grammar_mask, (num_rows, -(-vocab_size // 32)), torch.int32)


def _penalize(scores: Tensor, penalties: Penalties) -> Tensor:
    """Applies penalties to scores [num_rows, vocab_size], out of place."""
    used = (penalties.slots >= 0)[:, None]
    slots = penalties.slots.clamp(min=0)
    counts = torch.where(used, penalties.output_counts[slots], 0)
    if penalties.path_token_ids is not None:
        path = penalties.path_token_ids
        counts.scatter_add_(1, path.clamp(min=0), ((path >= 0) & used).to(counts.dtype))
    seen = (penalties.prompt_mask[slots] & used) | (counts > 0)
    repetition = penalties.repetition[:, None]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    scores = scores - penalties.frequency[:, None] * counts
    return scores - penalties.presence[:, None] * (counts > 0)


def apply_processors(logits: Tensor, processors: LogitProcessors) -> Tensor:
    """Applies bias, penalties and grammar to logits: torch reference.

    Args:
        logits: [num_rows, vocab_size], any float type; not modified.

    Returns:
        float32 [num_rows, vocab_size], tokens outside the grammar at -inf.

    Raises:
        ValueError: see `check_processors`.
    """
    num_rows, vocab_size = logits.shape
    check_processors(processors, num_rows, vocab_size)
    penalties, bias, grammar_mask = processors
    scores = logits.to(torch.float32)
    if bias is not None:
        scores = scores + torch.where((bias.rows >= 0)[:, None], bias.table[bias.rows.clamp(min=0)], 0.0)
    if penalties is not None:
        scores = _penalize(scores, penalties)
    if grammar_mask is not None:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = ((grammar_mask[..., None] >> bits) & 1).flatten(1)[:, :vocab_size]
        scores = scores.masked_fill(allowed == 0, float("-inf"))
    return scores
