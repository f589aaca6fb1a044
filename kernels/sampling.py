"""Choosing tokens: warped logits plus counter-based Gumbel noise; the torch reference and the CPU path.

The token of a row is argmax(processed logits + noise(seed, position, token)), which is an exact sample of
softmax(processed logits) (the Gumbel-max trick) and depends on nothing but the row: not on the batch, the tree around
it or the device's random state. History, bias and grammar come in as tensors (`LogitProcessors`); requests and trees
are unknown here. CUDA tensors go to the kernels of `triton_sampling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wingbeat.kernels.triton_sampling import SamplingWorkspace

# Multipliers of triple32, a 32-bit finalizer of three multiply-xorshift rounds found by exhaustive search
# (Chris Wellons, "Prospecting for Hash Functions"; bias 0.0208 against an ideal of 0).
_MULTIPLIER_1 = 0xED5AD4BB
_MULTIPLIER_2 = 0xAC4C1B51
_MULTIPLIER_3 = 0x31848BAB
# Two unrelated lanes give each row a 64-bit key; the third constant separates token hashes from row keys.
_LANE_1 = 0x9E3779B9
_LANE_2 = 0x85EBCA6B
_TOKEN_LANE = 0xC2B2AE35
# Tokens looked at before a CPU row is sorted whole; a nucleus of real text is rarely larger, and a sort costs 10x more.
_WINDOW = 128


class Penalties(NamedTuple):
    """Penalties on tokens a row has in its history.

    Repetition divides positive logits and multiplies the others, for tokens of the prompt or the output (transformers'
    RepetitionPenaltyLogitsProcessor; CTRL, arXiv:1909.05858). Frequency subtracts its value per occurrence and presence
    once, for tokens of the output (OpenAI's definition, as vLLM's `apply_penalties`), after repetition.
    """

    repetition: Tensor
    """float32 [num_rows], above 0; 1 is off."""
    presence: Tensor
    """float32 [num_rows]; 0 is off."""
    frequency: Tensor
    """float32 [num_rows]; 0 is off."""
    slots: Tensor
    """int64 [num_rows]: row of the two tables below; -1 has no penalties."""
    prompt_mask: Tensor
    """bool [num_slots, vocab_size]: the token occurs in the prompt."""
    output_counts: Tensor
    """int32 [num_slots, vocab_size]: occurrences in the output so far."""
    path_token_ids: Tensor | None = None
    """int64 [num_rows, max_path]: tokens that come after the table's for this row alone, -1 where there is none.

    A tree node's own path from below the root, itself included (`tree.path_token_ids`).
    """


class LogitBias(NamedTuple):
    """Values added to logits before penalties."""

    table: Tensor
    """float32 [num_tables, vocab_size]"""
    rows: Tensor
    """int64 [num_rows]: row of the table; -1 has no bias."""


class LogitProcessors(NamedTuple):
    """What changes logits before temperature, in this order: bias, penalties, grammar."""

    penalties: Penalties | None = None
    logit_bias: LogitBias | None = None
    grammar_mask: Tensor | None = None
    """int32 [num_rows, ceil(vocab_size / 32)]: bit b of word w allows token 32 * w + b (xgrammar's token bitmask)."""


def _signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _low_word(values: Tensor) -> Tensor:
    """Low 32 bits of int64 values as int32; the arithmetic avoids casts that are out of range."""
    return (((values & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _xor_shift_(words: Tensor, shift: int) -> Tensor:
    """words ^= words >>> shift; torch shifts int32 arithmetically, hence the mask."""
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _triple32_(words: Tensor) -> Tensor:
    """triple32 of int32 words in place: a bijection of 32 bits with full avalanche."""
    _xor_shift_(words, 17).mul_(_signed(_MULTIPLIER_1))
    _xor_shift_(words, 11).mul_(_signed(_MULTIPLIER_2))
    _xor_shift_(words, 15).mul_(_signed(_MULTIPLIER_3))
    return _xor_shift_(words, 14)


def _row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """int32 [2, num_rows]: two words per (seed, position).

    Each lane is a bijection of the position for a given seed, so no two positions of one request share their noise.
    """
    low = _low_word(seeds)
    words = _triple32_(torch.stack((low ^ _signed(_LANE_1), low ^ _signed(_LANE_2))))
    words = _triple32_(words.bitwise_xor_((seeds >> 32).to(torch.int32)))
    return _triple32_(words.bitwise_xor_(_low_word(positions)))


def noise_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The 23 random bits behind each noise value, as int32 in [0, 2**23).

    With u32 arithmetic and triple32(x) as above:
    key_i = triple32(triple32(triple32(low(seed) ^ LANE_i) ^ high(seed)) ^ low(position)) for i in 1, 2;
    x = triple32(low(token) ^ TOKEN_LANE) ^ key_1; x = (x ^ x >> 17) * M1; x = (x ^ x >> 11) + key_2; x = x * M2;
    x = (x ^ x >> 15) * M3; bits = x >> 9. The second key enters half-way so that two rows are never the same noise
    under a permutation of tokens.

    Args:
        seeds: int64 [num_rows].
        positions: int64 [num_rows].
        token_ids: int64 [vocab_size].

    Returns:
        int32 [num_rows, vocab_size].
    """
    if seeds.is_cuda:
        from wingbeat.kernels import triton_sampling

        return triton_sampling.noise(seeds, positions, token_ids, bits=True)
    keys = _row_keys(seeds, positions)
    tokens = _triple32_(_low_word(token_ids) ^ _signed(_TOKEN_LANE))
    words = tokens[None, :] ^ keys[0][:, None]
    _xor_shift_(words, 17).mul_(_signed(_MULTIPLIER_1))
    _xor_shift_(words, 11).add_(keys[1][:, None]).mul_(_signed(_MULTIPLIER_2))
    _xor_shift_(words, 15).mul_(_signed(_MULTIPLIER_3))
    return words.bitwise_right_shift_(9).bitwise_and_((1 << 23) - 1)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise keyed by (seed, position, token) alone.

    The uniform is (bits + 0.5) / 2**23: exact in float32 and never 0 or 1, so the noise is finite (-2.82 to 16.64).

    Args:
        seeds: int64 [num_rows].
        positions: int64 [num_rows]: position of the token being chosen.
        token_ids: int64 [vocab_size].

    Returns:
        float32 [num_rows, vocab_size].
    """
    if seeds.is_cuda:
        from wingbeat.kernels import triton_sampling

        return triton_sampling.noise(seeds, positions, token_ids, bits=False)
    uniform = noise_bits(seeds, positions, token_ids).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _filter(logits: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Mask float32 logits [num_rows, vocab_size] by top-k, top-p, then min-p, with one sort; out of place."""
    vocab_size = logits.shape[-1]
    minus_inf = float("-inf")
    # Ascending, as transformers sorts: of equal logits at the edge of the nucleus the lowest ids go first.
    ranked, order = torch.sort(logits, dim=-1, stable=True)
    kth = (vocab_size - top_ks).clamp(min=0, max=vocab_size - 1)[:, None]
    below_kth = (ranked < ranked.gather(-1, kth)) & (top_ks > 0)[:, None]
    ranked.masked_fill_(below_kth, minus_inf)
    # Summed in double and rounded once: what float32 cumsum does on the CPU.
    mass = torch.softmax(ranked, dim=-1).cumsum(dim=-1, dtype=torch.float64).to(torch.float32)
    outside = (mass <= (1.0 - top_ps.double()).to(torch.float32)[:, None]) & (top_ps < 1.0)[:, None]
    outside[:, -1] = False
    removed = torch.empty_like(outside).scatter_(-1, order, outside | below_kth)
    kept = logits.masked_fill(removed, minus_inf)
    probs = torch.softmax(kept, dim=-1)
    return kept.masked_fill_(probs < min_ps[:, None] * probs.amax(dim=-1, keepdim=True), minus_inf)


def _filter_window(logits: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> tuple[Tensor, Tensor]:
    """`_filter` by the best _WINDOW tokens of each row, and bool [num_rows]: where they were enough.

    Each filter keeps the upper end of the ranking, so where it removes the window's last token it removes the rest.
    Top-k must do so by itself, since what it keeps is what top-p measures by.
    """
    minus_inf = float("-inf")
    ranked, order = logits.topk(_WINDOW, dim=-1)
    best = ranked[:, :1]
    kth = (top_ks - 1).clamp(min=0, max=_WINDOW - 1)[:, None]
    below_kth = (ranked < ranked.gather(-1, kth)) & (top_ks > 0)[:, None]
    weights = (ranked - best).exp().masked_fill(below_kth, 0.0)
    whole = (logits - best).exp().sum(dim=-1, dtype=torch.float64)
    total = torch.where(top_ks > 0, weights.sum(dim=-1, dtype=torch.float64), whole)[:, None]
    # Mass of a token and all below it, as in `_filter`, counted from the other end.
    mass = 1.0 - (weights.cumsum(dim=-1, dtype=torch.float64) - weights) / total
    outside = (mass.float() <= (1.0 - top_ps.double()).float()[:, None]) & (top_ps < 1.0)[:, None]
    outside[:, 0] = False
    removed = below_kth | outside | (weights < min_ps[:, None])
    kept = torch.full_like(logits, minus_inf).scatter_(-1, order, ranked.masked_fill(removed, minus_inf))
    return kept, removed[:, -1] & ((top_ks == 0) | below_kth[:, -1])


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
    fits = tensor.dim() == len(shape) and all(want in (None, n) for want, n in zip(shape, tensor.shape, strict=False))
    if not fits or tensor.dtype != dtype:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}: it must be {dtype} [{wanted}]")


def check_processors(processors: LogitProcessors, num_rows: int, vocab_size: int) -> None:
    """Refuse tensors that do not have the documented shape and dtype; looks at no values.

    Raises:
        ValueError: names the field, what it is and what it must be.
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
    """Scores [num_rows, vocab_size] under penalties, out of place."""
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
    """Logits after bias, penalties and grammar; the torch reference of what the kernels do tile by tile.

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


def process_logits(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    *,
    any_filtered: bool = True,
    processors: LogitProcessors | None = None,
) -> Tensor:
    """Warp logits as transformers' warpers do, each row by its own parameters: temperature, top-k, top-p, min-p.

    Top-k keeps ties with the k-th logit; top-p keeps the smallest set whose mass reaches top_p, at least one token;
    min-p keeps tokens at least min_p times as probable as the best. Rows with temperature 0 are not warped. On a GPU
    the mass is summed in fixed point, whose rounding (below 2**-24 of the whole) may move the edge of the nucleus, and
    of min-p, by one token where a mass falls onto it; of equal logits at the edge the lowest ids go first.

    Args:
        logits: [num_rows, vocab_size], any float type; not modified.
        temperatures: float32 [num_rows], 0 or more.
        top_ks: int64 [num_rows]; 0 is off.
        top_ps: float32 [num_rows]; 1 is off.
        min_ps: float32 [num_rows]; 0 is off.
        any_filtered: False promises that no row uses top-k, top-p or min-p, which saves the search for their edges.
        processors: applied to every row, warped or not, before temperature.

    Returns:
        float32 [num_rows, vocab_size], removed tokens at -inf.

    Raises:
        ValueError: see `check_processors`.
    """
    if logits.is_cuda:
        from wingbeat.kernels import triton_sampling

        return triton_sampling.process_logits(
            logits, temperatures, top_ks, top_ps, min_ps, any_filtered=any_filtered, processors=processors
        )
    if processors is not None:
        logits = apply_processors(logits, processors)
    sampled = temperatures > 0
    scaled = logits.to(torch.float32) / torch.where(sampled, temperatures, 1.0)[:, None]
    if not any_filtered:
        return scaled
    filtered = sampled & ((top_ks > 0) | (top_ps < 1.0) | (min_ps > 0))
    rows = filtered.nonzero().squeeze(-1)
    if logits.shape[-1] > _WINDOW:
        kept, enough = _filter_window(scaled[rows], top_ks[rows], top_ps[rows], min_ps[rows])
        scaled[rows[enough]] = kept[enough]
        rows = rows[~enough]
    if rows.numel():
        scaled[rows] = _filter(scaled[rows], top_ks[rows], top_ps[rows], min_ps[rows])
    return scaled


def choose_tokens(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    any_sampled: bool,
    any_filtered: bool,
    processors: LogitProcessors | None = None,
    workspace: SamplingWorkspace | None = None,
) -> Tensor:
    """The token of each row: argmax at temperature 0, else argmax(processed logits + Gumbel noise).

    A row's token does not depend on the other rows. Equal scores go to the lowest id. On a GPU nothing waits for the
    device and launches depend on shapes and flags alone, so a call can be captured in a CUDA graph.

    Args:
        logits: [num_rows, vocab_size], any float type.
        temperatures, top_ks, top_ps, min_ps: [num_rows], as for `process_logits`.
        seeds: int64 [num_rows].
        positions: int64 [num_rows]: position the chosen token will have.
        any_sampled: False promises that every temperature is 0.
        any_filtered: False promises that no row uses top-k, top-p or min-p.
        processors: applied to every row, sampled or not.
        workspace: memory of the GPU kernels, from `sampling_workspace`; allocated by the call when not given.

    Returns:
        int64 [num_rows].

    Raises:
        ValueError: see `check_processors`; or the workspace is too small.
    """
    if logits.is_cuda and (any_sampled or processors is not None):
        from wingbeat.kernels import triton_sampling

        return triton_sampling.choose_tokens(
            logits,
            temperatures,
            top_ks,
            top_ps,
            min_ps,
            seeds,
            positions,
            any_filtered=any_sampled and any_filtered,
            processors=processors,
            workspace=workspace,
        )
    if not any_sampled:
        return (logits if processors is None else apply_processors(logits, processors)).argmax(dim=-1)
    processed = process_logits(
        logits, temperatures, top_ks, top_ps, min_ps, any_filtered=any_filtered, processors=processors
    )
    noise = gumbel_noise(seeds, positions, torch.arange(logits.shape[-1], device=logits.device))
    return processed.add_(noise.masked_fill_((temperatures == 0)[:, None], 0.0)).argmax(dim=-1)


def sampling_workspace(max_rows: int, vocab_size: int, device: torch.device | str) -> SamplingWorkspace | None:
    """Memory for `choose_tokens` of up to max_rows rows, to share between CUDA graphs; None where none is used."""
    if torch.device(device).type != "cuda":
        return None
    from wingbeat.kernels.triton_sampling import SamplingWorkspace

    return SamplingWorkspace(max_rows, vocab_size, device)
