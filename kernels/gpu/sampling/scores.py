"""Token scores on a GPU: processors, temperature and noise in one pass, and the best score of each row.

Programs that share a row find the best scores of their shares; the last program to finish merges them. Reference:
`processors.apply_processors`, and `reference` for the rest.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.sampling.noise import FP_FUSION, gumbel, row_keys
from wingbeat.kernels.gpu.sampling.scratch import Rows, SamplingWorkspace, Shares, slot_of
from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.sampling.processors import LogitProcessors, check_processors

_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p):
    return (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0))


@triton.jit
def keep_best(best_scores, best_ids, scores, ids):
    """Keeps the better score in each lane; on ties the earlier id stays."""
    better = scores > best_scores
    return tl.where(better, scores, best_scores), tl.where(better, ids, best_ids)


@triton.jit
def first_best(scores, ids):
    """Returns the highest score and the lowest id that has it."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, ids, _NO_TOKEN), axis=0)


@triton.jit
def store_best(scores, ids, best_scores, best_ids, share):
    """Writes the best score of a share, and its token."""
    score, token = first_best(scores, ids)
    tl.store(best_scores + share, score)
    tl.store(best_ids + share, token)


@triton.jit
def write_best(best_scores, best_ids, out, row, num_splits, SPLITS: tl.constexpr):
    """Writes a row's token from the best scores of the row's shares; 0 if every score is -inf."""
    at = tl.arange(0, SPLITS)
    mask = at < num_splits
    shares = row * num_splits + at
    scores = tl.load(best_scores + shares, mask=mask, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(best_ids + shares, mask=mask, other=2147483647, cache_modifier=".cg")
    _, token = first_best(scores, ids)
    tl.store(out + row, tl.where(token == _NO_TOKEN, 0, token).to(tl.int64))


@triton.jit
def merge_last(best_scores, best_ids, num_done, out, row, num_splits, SPLITS: tl.constexpr):
    """The last program to finish a row writes the row's token."""
    tl.debug_barrier()  # the program's own best is stored before one thread increments the counter
    done = tl.atomic_add(num_done + row, 1, sem="acq_rel")
    if done == num_splits - 1:
        write_best(best_scores, best_ids, out, row, num_splits, SPLITS)
        tl.store(num_done + row, 0)


@triton.jit(
    do_not_specialize=["path_length", "length", "num_splits"], do_not_specialize_on_alignment=["slots", "positions"]
)
def _scale_kernel(
    logits,
    logits_stride,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    slots,
    repetitions,
    presences,
    frequencies,
    history_slots,
    prompt_mask,
    output_counts,
    path_token_ids,
    path_length,
    bias_table,
    bias_rows,
    grammar_mask,
    grammar_stride,
    scaled,
    maxima,
    minima,
    num_listed,
    best_scores,
    best_ids,
    num_done,
    out,
    vocab_size,
    length,
    num_splits,
    ANY_FILTERED: tl.constexpr,
    KEEP_ALL: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_PATH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GRAMMAR: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Applies processors and temperature.

    Finds the best score of rows without filters, and stores the scores of rows with filters. Writes the rows' tokens
    if `out` is not None.
    """
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = slot_of(slots, row)
    temperature = tl.load(temperatures + slot)
    sampled = temperature > 0
    divisor = tl.where(sampled, temperature, 1.0)
    filtered = False
    noisy = sampled
    if ANY_FILTERED:
        filtered = is_filtered(temperature, tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot))
        noisy = sampled & (filtered == 0)
        if split == 0:
            tl.store(num_listed + row, 0)
    stored = filtered
    if KEEP_ALL:
        stored = True
    key_1, key_2 = row_keys(tl.load(seeds + slot), tl.load(positions + row))
    history = -1
    repetition = 1.0
    presence = 0.0
    frequency = 0.0
    if HAS_PENALTIES:
        history = tl.load(history_slots + row)
        repetition = tl.load(repetitions + row)
        presence = tl.load(presences + row)
        frequency = tl.load(frequencies + row)
    bias_row = -1
    if HAS_BIAS:
        bias_row = tl.load(bias_rows + row)
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), dtype=tl.float32)
    best_at = tl.full([TILE], 2147483647, dtype=tl.int32)
    largest = tl.full([TILE], float("-inf"), dtype=tl.float32)
    smallest = tl.full([TILE], float("inf"), dtype=tl.float32)
    begin = split * length
    for start in range(begin, tl.minimum(begin + length, vocab_size), TILE):
        ids = start + lanes
        mask = ids < vocab_size
        values = tl.load(logits + row * logits_stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
        # The outer condition is evaluated at compile time, the inner condition for each row.
        if HAS_BIAS:  # noqa: SIM102
            if bias_row >= 0:
                values += tl.load(bias_table + bias_row * vocab_size + ids, mask=mask, other=0.0)
        if HAS_PENALTIES:  # noqa: SIM102
            if (history >= 0) & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)):
                counts = tl.load(output_counts + history * vocab_size + ids, mask=mask, other=0)
                if HAS_PATH:
                    for step in range(path_length):
                        token = tl.load(path_token_ids + row * path_length + step)
                        counts += (ids == token).to(tl.int32)
                prompted = tl.load(prompt_mask + history * vocab_size + ids, mask=mask, other=0)
                repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
                values = tl.where((prompted != 0) | (counts > 0), repeated, values)
                values = values - frequency * counts.to(tl.float32)
                values = values - presence * (counts > 0).to(tl.float32)
        if HAS_GRAMMAR:
            words = tl.load(grammar_mask + row * grammar_stride + (ids >> 5), mask=mask, other=0)
            values = tl.where(((words >> (ids & 31)) & 1) != 0, values, float("-inf"))
        values = tl.div_rn(values, divisor)
        # -0 becomes 0, because the search compares bits, in which the two differ.
        values = tl.where(values == 0, 0.0, values)
        if stored:
            tl.store(scaled + row * vocab_size + ids, values, mask=mask)
        largest = tl.maximum(largest, tl.where(mask, values, float("-inf")))
        smallest = tl.minimum(smallest, tl.where(mask & (values > float("-inf")), values, float("inf")))
        scores = values
        if noisy:
            scores = values + gumbel(key_1, key_2, ids)
        best, best_at = keep_best(best, best_at, tl.where(mask, scores, float("-inf")), ids)
    share = row * num_splits + split
    tl.store(maxima + share, tl.max(largest, axis=0))
    tl.store(minima + share, tl.min(smallest, axis=0))
    store_best(best, best_at, best_scores, best_ids, share)
    if out is not None:
        merge_last(best_scores, best_ids, num_done, out, row, num_splits, SPLITS)


@triton.jit(do_not_specialize=["length", "num_splits"])
def _best_kernel(
    logits,
    logits_stride,
    best_scores,
    best_ids,
    num_done,
    out,
    vocab_size,
    length,
    num_splits,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Finds the best token of each row of unprocessed logits."""
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), dtype=tl.float32)
    best_at = tl.full([TILE], 2147483647, dtype=tl.int32)
    begin = split * length
    for start in range(begin, tl.minimum(begin + length, vocab_size), TILE):
        ids = start + lanes
        mask = ids < vocab_size
        values = tl.load(logits + row * logits_stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
        best, best_at = keep_best(best, best_at, values, ids)
    store_best(best, best_at, best_scores, best_ids, row * num_splits + split)
    merge_last(best_scores, best_ids, num_done, out, row, num_splits, SPLITS)


def find_best(logits: Tensor, workspace: SamplingWorkspace, shares: Shares, out: Tensor) -> None:
    """Writes the best token of each row to `out` [num_rows]."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    _best_kernel[(len(out), shares.num_splits)](
        logits,
        logits.stride(0),
        workspace.best_scores,
        workspace.best_ids,
        workspace.num_done,
        out,
        logits.shape[1],
        shares.length,
        shares.num_splits,
        SPLITS=shares.most_splits,
        TILE=shares.tile,
        **options(fused=FP_FUSION),
    )


def _processor_arguments(processors: LogitProcessors | None, logits: Tensor) -> dict[str, Any]:
    """Arguments of `_scale_kernel` for the processors; None for unused ones."""
    penalties, bias, grammar_mask = processors or LogitProcessors()
    if processors is not None:
        check_processors(processors, *logits.shape)
    path = None if penalties is None else penalties.path_token_ids
    has_path = path is not None and path.shape[1] > 0
    return {
        "repetitions": None if penalties is None else penalties.repetition.contiguous(),
        "presences": None if penalties is None else penalties.presence.contiguous(),
        "frequencies": None if penalties is None else penalties.frequency.contiguous(),
        "history_slots": None if penalties is None else penalties.slots.contiguous(),
        "prompt_mask": None if penalties is None else _table("prompt_mask", penalties.prompt_mask).view(torch.uint8),
        "output_counts": None if penalties is None else _table("output_counts", penalties.output_counts),
        "path_token_ids": path.contiguous() if has_path else None,
        "path_length": path.shape[1] if has_path else 0,
        "bias_table": None if bias is None else _table("logit_bias.table", bias.table),
        "bias_rows": None if bias is None else bias.rows.contiguous(),
        "grammar_mask": None if grammar_mask is None else grammar_mask.contiguous(),
        "grammar_stride": 0 if grammar_mask is None else grammar_mask.shape[1],
        "HAS_PENALTIES": penalties is not None,
        "HAS_PATH": has_path,
        "HAS_BIAS": bias is not None,
        "HAS_GRAMMAR": grammar_mask is not None,
    }


def _table(name: str, table: Tensor) -> Tensor:
    # A contiguous copy would cost more than all other steps here, so it must not happen silently.
    if not table.is_contiguous():
        raise ValueError(f"{name} has strides {table.stride()}: it must be contiguous")
    return table


def scale_rows(
    logits: Tensor,
    rows: Rows,
    processors: LogitProcessors | None,
    workspace: SamplingWorkspace,
    shares: Shares,
    *,
    any_filtered: bool,
    choose: bool,
    out: Tensor | None = None,
) -> None:
    """Finds the best score of each share of unfiltered rows, and stores filtered rows divided by temperature.

    Args:
        logits: [num_rows, vocab_size], any float type.
        choose: False stores every row.
        out: int64 [num_rows], receives the rows' tokens if no row is filtered.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    _scale_kernel[(num_rows, shares.num_splits)](
        logits,
        logits.stride(0),
        *rows,
        **_processor_arguments(processors, logits),
        scaled=workspace.scaled,
        maxima=workspace.maxima,
        minima=workspace.minima,
        num_listed=workspace.num_listed,
        best_scores=workspace.best_scores,
        best_ids=workspace.best_ids,
        num_done=workspace.num_done,
        out=out,
        vocab_size=vocab_size,
        length=shares.length,
        num_splits=shares.num_splits,
        ANY_FILTERED=any_filtered,
        KEEP_ALL=not choose,
        SPLITS=shares.most_splits,
        TILE=shares.tile,
        **options(fused=FP_FUSION),
    )
