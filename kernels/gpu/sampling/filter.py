"""Best score among the tokens that top-k, top-p and min-p keep, on a GPU; `nucleus` finds the edges.

Reference: `sampling.process_logits`.
"""

import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.sampling.integers import largest_of_row, sortable, weight_of
from wingbeat.kernels.gpu.sampling.noise import FP_FUSION, gumbel, row_keys
from wingbeat.kernels.gpu.sampling.nucleus import find_edges
from wingbeat.kernels.gpu.sampling.scores import is_filtered, keep_best, merge_last, store_best, write_best
from wingbeat.kernels.gpu.sampling.scratch import Rows, SamplingWorkspace, Shares, slot_of
from wingbeat.kernels.launching import options, wait_for_launch


@triton.jit(do_not_specialize=["length", "num_splits"], do_not_specialize_on_alignment=["slots", "positions"])
def _filter_kernel(
    scaled,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    slots,
    edges,
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
    """Writes each row's token: the best score among the tokens that a filtered row keeps.

    If `out` is None, sets the scores of removed tokens to -inf instead.
    """
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = slot_of(slots, row)
    min_p = tl.load(min_ps + slot)
    filtered = is_filtered(tl.load(temperatures + slot), tl.load(top_ks + slot), tl.load(top_ps + slot), min_p)
    if filtered == 0:
        if out is not None:  # noqa: SIM102
            if split == 0:
                write_best(best_scores, best_ids, out, row, num_splits, SPLITS)
        return
    largest = largest_of_row(maxima, row, num_splits, SPLITS)
    lowest = tl.load(edges + row * 2).to(tl.uint32)
    # Among tokens whose key equals the lowest, top-p removes the tokens with the lowest ids, up to this id.
    last_removed = tl.load(edges + row * 2 + 1)
    key_1, key_2 = row_keys(tl.load(seeds + slot), tl.load(positions + row))
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), dtype=tl.float32)
    best_at = tl.full([TILE], 2147483647, dtype=tl.int32)
    begin = split * length
    for start in range(begin, tl.minimum(begin + length, vocab_size), TILE):
        ids = start + lanes
        mask = ids < vocab_size
        values = tl.load(scaled + row * vocab_size + ids, mask=mask, other=float("-inf"))
        keys = sortable(values)
        kept = mask & (keys >= lowest) & (weight_of(values, largest) >= min_p)
        kept = kept & ((keys != lowest) | (ids > last_removed))
        if out is not None:
            scores = tl.where(kept, values + gumbel(key_1, key_2, ids), float("-inf"))
            best, best_at = keep_best(best, best_at, scores, ids)
        else:
            # In a short tile several warps hold the same element, so all warps must have read before one of them
            # writes.
            tl.debug_barrier()
            tl.store(scaled + row * vocab_size + ids, tl.where(kept, values, float("-inf")), mask=mask)
    if out is not None:
        store_best(best, best_at, best_scores, best_ids, row * num_splits + split)
        merge_last(best_scores, best_ids, num_done, out, row, num_splits, SPLITS)


def filter_rows(
    rows: Rows, workspace: SamplingWorkspace, shares: Shares, out: Tensor | None, *, listed_only: bool = False
) -> None:
    """Filters the rows that `scale_rows` stored: four or six launches.

    Args:
        out: int64 [num_rows], receives every row's token; None sets removed tokens to -inf in place.
        listed_only: see `find_edges`.
    """
    find_edges(rows, workspace, shares, listed_only=listed_only)
    _filter_kernel[(len(rows.positions), shares.num_splits)](
        workspace.scaled,
        workspace.maxima,
        *rows,
        workspace.edges,
        workspace.best_scores,
        workspace.best_ids,
        workspace.num_done,
        out,
        workspace.vocab_size,
        shares.length,
        shares.num_splits,
        SPLITS=shares.most_splits,
        TILE=shares.tile,
        **options(fused=FP_FUSION),
    )
