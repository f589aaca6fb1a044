"""The verifier's own text after beginnings of different lengths, and what it sees when it reads a text."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from wingbeat.kernels.sampling.reference import choose_tokens
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.recordings.recording_sources import Start

_STEPS_PER_LOOK = 16
"""Tokens between two looks at whether all rows have ended: on an accelerator, a look is a wait."""
_LOGITS_BYTES = 2**30
"""Of the logits of one forward pass over whole texts."""


class Seen(NamedTuple):
    """What the verifier makes of one text, on the CPU; see `wingbeat.runtime.recordings.format.Record`."""

    taps: Tensor
    top_ids: Tensor | None
    top_logits: Tensor | None
    logsumexp: Tensor | None


@torch.no_grad()
def continue_texts(verifier: FrozenVerifier, starts: list[Start], eos_token_ids: frozenset[int]) -> list[Tensor]:
    """Each beginning with what the verifier writes after it, up to its length or an end-of-text token, included.

    The token at (text, position) is argmax(logits / temperature + Gumbel(seed, position, token)), as in the engine. The
    beginnings are padded on the left to one width, so equal widths cost least.

    Returns:
        int64 [length] per beginning, on the CPU.
    """
    short = [start for start in starts if len(start.token_ids) < start.length]
    if short and len(short) < len(starts):
        continued = iter(continue_texts(verifier, short, eos_token_ids))
        return [next(continued) if len(s.token_ids) < s.length else s.token_ids for s in starts]
    if not short:
        return [start.token_ids for start in starts]
    device = verifier.embedding.device
    given = torch.tensor([len(start.token_ids) for start in starts])
    most = max(start.length - len(start.token_ids) for start in starts)
    width = int(given.max())
    tokens = torch.zeros(len(starts), width, dtype=torch.int64)
    for row, start in enumerate(starts):
        tokens[row, width - len(start.token_ids) :] = start.token_ids
    left = (width - given).to(device)
    columns = torch.arange(width + most, device=device)
    mask = (columns >= left[:, None]).long() if bool((given < width).any()) else None
    positions = (columns - left[:, None]).clamp_min(0)
    temperatures = torch.tensor([start.temperature for start in starts], device=device)
    seeds = torch.tensor([start.seed for start in starts], device=device)
    zeros = torch.zeros_like(seeds)
    ends = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
    ended = torch.zeros(len(starts), dtype=torch.bool, device=device)
    cache, new, written = DynamicCache(config=verifier.model.config), tokens.to(device), []
    for step in range(most):
        filled = width + step
        logits = verifier.model(
            input_ids=new,
            attention_mask=None if mask is None else mask[:, :filled],
            position_ids=positions[:, filled - new.shape[1] : filled],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        chosen = choose_tokens(
            logits,
            temperatures,
            zeros,
            torch.ones_like(temperatures),
            torch.zeros_like(temperatures),
            seeds,
            positions[:, filled].contiguous(),
            any_sampled=any(start.temperature > 0 for start in starts),
            any_filtered=False,
        )
        written.append(chosen)
        new = chosen[:, None]
        ended |= torch.isin(chosen, ends)
        if step % _STEPS_PER_LOOK == _STEPS_PER_LOOK - 1 and bool(ended.all()):
            break
    text = torch.stack(written, dim=1).cpu()
    return [_cut(start, row, eos_token_ids) for start, row in zip(starts, text, strict=True)]


@torch.no_grad()
def read_texts(
    verifier: FrozenVerifier, texts: list[Tensor], top_k: int, taps_dtype: torch.dtype, logits_dtype: torch.dtype
) -> list[Seen]:
    """What the verifier sees at every token of texts, by forward passes over as many as its logits leave room for.

    Args:
        texts: int64 [length] each.
        top_k: logits to keep per token; 0 keeps none.
    """
    longest = max(map(len, texts))
    rows = max(1, _LOGITS_BYTES // (longest * verifier.embedding.shape[0] * logits_dtype.itemsize))
    seen = []
    for first in range(0, len(texts), rows):
        part = texts[first : first + rows]
        # What follows a text cannot be seen from within it, so padding on the right needs no mask.
        tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        observed = verifier.observe(tokens.to(verifier.embedding.device))
        for row, text in enumerate(part):
            taps = observed.taps[row, : len(text)].to(taps_dtype).cpu()
            seen.append(Seen(taps, *_top(observed.logits[row, : len(text)], top_k, logits_dtype)))
    return seen


def _top(logits: Tensor, top_k: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Ids, logits and logsumexp [num_tokens, ...] of logits [num_tokens, vocab_size]."""
    if not top_k:
        return None, None, None
    logits = logits.float()
    top = logits.topk(top_k, dim=-1)
    return top.indices.int().cpu(), top.values.to(dtype).cpu(), logits.logsumexp(dim=-1).cpu()


def _cut(start: Start, written: Tensor, eos_token_ids: frozenset[int]) -> Tensor:
    """A beginning and its continuation, as far as it counts."""
    kept = written[: start.length - len(start.token_ids)]
    if eos_token_ids:
        ends = torch.isin(kept, torch.tensor(sorted(eos_token_ids))).nonzero()
        kept = kept[: int(ends[0]) + 1] if len(ends) else kept
    return torch.cat([start.token_ids, kept])
