"""Growth of draft trees on a GPU; the reference is `table`.

Each program handles a request, in registers. Each level takes one launch, and selecting the finished tree one more. The
host never waits for the device, and launches depend on shapes alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.sampling.integers import sortable
from wingbeat.kernels.gpu.tree.walk import num_warps
from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.tree.results import Frontier, GrownTree


@triton.jit
def level_kernel(
    token_ids,
    log_probs,
    parent_entries,
    parent_scores,
    table_token_ids,
    table_parents,
    table_scores,
    out_token_ids,
    out_entries,
    out_scores,
    out_parents,
    visible,  # int64 [num_reqs, top_k, num_words]: masks of the previous frontier, or None
    itself,  # int64 [top_k, num_words], or None
    out_visible,  # int64 [num_reqs, top_k, num_words], or None
    size,
    begin,
    num_candidates,
    top_k,
    num_words,
    width,  # number of programs on the grid's first axis for each request
    IS_ROOT: tl.constexpr,
    LANES: tl.constexpr,
    LANE_BITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Enters a request's candidates into its table and selects its next frontier; `candidates` calls this as well."""
    wait_for_launch(EARLY)
    req = (tl.program_id(0) // width).to(tl.int64)
    lanes = tl.arange(0, LANES)
    mask = lanes < num_candidates
    at = req * num_candidates + lanes
    tokens = tl.load(token_ids + at, mask=mask, other=0, cache_modifier=".cg")
    scores = tl.load(log_probs + at, mask=mask, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    # NaN marks a missing candidate. The clamp ensures that a child's score never exceeds its parent's.
    scores = tl.where(scores == scores, scores, float("-inf"))  # noqa: PLR0124
    scores = tl.where(scores > 0, 0.0, scores)
    place = lanes // top_k
    parents = tl.zeros([LANES], dtype=tl.int64)
    if not IS_ROOT:
        parents = tl.load(parent_entries + req * top_k + place, mask=mask, other=0)
        scores = tl.load(parent_scores + req * top_k + place, mask=mask, other=float("-inf")) + scores
    else:
        # This tree may not reach all levels. Scores that an earlier tree left in further levels are cleared, so that
        # they are never kept.
        for start in range(begin + num_candidates, size, LANES):
            rest = start + lanes
            tl.store(table_scores + req * size + rest, float("-inf"), mask=rest < size)
    entries = begin + lanes
    tl.store(table_token_ids + req * size + entries, tokens, mask=mask)
    tl.store(table_parents + req * size + entries, parents, mask=mask)
    tl.store(table_scores + req * size + entries, scores, mask=mask)
    # Keys are unique: among equal scores the lower lane has the larger key. -0 and 0 are equal.
    keys = (sortable(tl.where(scores == 0, 0.0, scores)).to(tl.int64) << LANE_BITS) | (LANES - 1 - lanes)
    keys = tl.where(mask, keys, -1)
    rank = tl.full([LANES], 2147483647, dtype=tl.int32)
    for taken in range(top_k):
        best = keys == tl.max(keys, axis=0)
        rank = tl.where(best, taken, rank)
        keys = tl.where(best, -1, keys)
    chosen = mask & (rank < top_k)
    to = req * top_k + rank
    tl.store(out_token_ids + to, tokens, mask=chosen)
    tl.store(out_entries + to, entries.to(tl.int64), mask=chosen)
    tl.store(out_scores + to, scores, mask=chosen)
    if IS_ROOT:
        place = tl.zeros([LANES], dtype=tl.int32)
    tl.store(out_parents + to, place.to(tl.int64), mask=chosen)
    if itself is not None:
        own = tl.where(chosen, rank, 0) * num_words
        for word in range(num_words):
            seen = tl.load(itself + own + word, mask=chosen, other=0)
            if not IS_ROOT:
                seen |= tl.load(visible + (req * top_k + place) * num_words + word, mask=chosen, other=0)
            tl.store(out_visible + to * num_words + word, seen, mask=chosen)


class Level(NamedTuple):
    """A level that is entered into a table."""

    frontier: Frontier | None
    """The frontier that was expanded; None for the root's children."""
    table: tuple[Tensor, Tensor, Tensor]
    """Token ids, parents and scores [num_reqs, size]."""
    begin: int
    """Entry of the level's first candidate."""
    itself: Tensor | None = None
    """int64 [top_k, num_words]: packed masks, see `table.inherited`; None returns no masks."""

    def arguments(self, num_candidates: int, top_k: int) -> tuple[Frontier, tuple, dict]:
        """The next frontier, and the arguments of `level_kernel` between candidates and `width`, and its constants."""
        before, table, begin, itself = self
        num_reqs, size = table[0].shape
        token_ids, entries, scores, parents = (
            torch.empty(num_reqs, top_k, dtype=part.dtype, device=part.device) for part in (*table, table[1])
        )
        visible = None if itself is None else itself.new_empty(num_reqs, *itself.shape)
        lanes = triton.next_power_of_2(num_candidates)
        given = (
            *((None, None) if before is None else (before.table_index, before.scores)),
            *(*table, token_ids, entries, scores, parents),
            *(None if before is None or itself is None else before.visible, itself, visible),
            *(size, begin, num_candidates, top_k, 0 if itself is None else itself.shape[1]),
        )
        constants = {"IS_ROOT": before is None, "LANES": lanes, "LANE_BITS": lanes.bit_length() - 1}
        return Frontier(token_ids, entries, scores, parents, visible), given, constants


def add_level(token_ids: Tensor, log_probs: Tensor, level: Level) -> Frontier:
    """Enters candidates [num_reqs, width, top_k] and selects the next frontier; see `TreeTable`."""
    num_reqs, width, top_k = token_ids.shape
    frontier, given, constants = level.arguments(width * top_k, top_k)
    if num_reqs:
        with torch.cuda.device_of(token_ids):
            level_kernel[(num_reqs,)](
                token_ids.contiguous(),
                log_probs.contiguous(),
                *given,
                1,
                num_warps=num_warps(constants["LANES"]),
                **constants,
                **options(fused=False),
            )
    return frontier


@triton.jit
def _finalize_kernel(
    table_token_ids,
    table_parents,
    table_scores,
    table_depths,
    root_token_ids,
    out_token_ids,
    out_parents,
    out_depths,
    out_scores,
    out_num_valid,
    size,
    num_nodes,
    num_kept,
    LANES: tl.constexpr,
    LANE_BITS: tl.constexpr,
    NODES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    req = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    entered = lanes < size
    is_root = lanes == 0
    scores = tl.load(table_scores + req * size + lanes, mask=entered & (lanes > 0), other=float("-inf"))
    parents = tl.load(table_parents + req * size + lanes, mask=entered & (lanes > 0), other=0).to(tl.int32)
    # Keys are unique: among equal scores the lower entry has the larger key. -0 and 0 are equal.
    keys = (sortable(tl.where(scores == 0, 0.0, scores)).to(tl.int64) << LANE_BITS) | (LANES - 1 - lanes)
    keys = tl.where(entered & (lanes > 0), keys, -1)
    # Finds the num_kept-th largest key bit by bit. If no key is kept, the result is above every key.
    edge = tl.full([], 0, dtype=tl.int64)
    for bit in range(32 + LANE_BITS):
        higher = edge | (tl.full([], 1, dtype=tl.int64) << (31 + LANE_BITS - bit))
        edge = tl.where(tl.sum((keys >= higher).to(tl.int32), axis=0) >= num_kept, higher, edge)
    kept = tl.where(keys >= edge, scores, float("-inf")) > float("-inf")
    numbers = tl.where(kept, tl.cumsum(kept.to(tl.int32), axis=0), 0)
    num_valid = 1 + tl.sum(kept.to(tl.int32), axis=0)
    live = kept | is_root
    token_ids = tl.load(table_token_ids + req * size + lanes, mask=entered, other=0)
    token_ids = tl.where(is_root, tl.load(root_token_ids + req), token_ids)
    depths = tl.load(table_depths + lanes, mask=entered, other=0)
    node_parents = tl.where(is_root, -1, tl.gather(numbers, parents, 0))
    to = req * num_nodes + numbers
    tl.store(out_token_ids + to, token_ids, mask=live)
    tl.store(out_parents + to, node_parents.to(tl.int64), mask=live)
    tl.store(out_depths + to, depths, mask=live)
    tl.store(out_scores + to, tl.where(is_root, 0.0, scores), mask=live)
    tl.store(out_num_valid + req, num_valid.to(tl.int64))
    nodes = tl.arange(0, NODES)
    padding = (nodes >= num_valid) & (nodes < num_nodes)
    zeros = tl.zeros([NODES], dtype=tl.int64)
    pad_to = req * num_nodes + nodes
    tl.store(out_token_ids + pad_to, zeros, mask=padding)
    tl.store(out_parents + pad_to, zeros, mask=padding)
    tl.store(out_depths + pad_to, zeros, mask=padding)
    tl.store(out_scores + pad_to, float("-inf"), mask=padding)


def finalize(table: tuple[Tensor, Tensor, Tensor], depths: Tensor, root_token_ids: Tensor, num_nodes: int) -> GrownTree:
    """Selects and renumbers the best nodes of a table; see `TreeTable.finalize`.

    Args:
        table: token ids, parents and scores [num_reqs, size].
        depths: int64 [size].
    """
    num_reqs, size = table[0].shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(num_reqs, *shape, dtype=torch.int64, device=root_token_ids.device)

    tree = GrownTree(
        empty(num_nodes),
        empty(num_nodes),
        empty(num_nodes),
        torch.empty(num_reqs, num_nodes, dtype=torch.float32, device=root_token_ids.device),
        empty(),
    )
    lanes = triton.next_power_of_2(size)
    if num_reqs:
        with torch.cuda.device_of(root_token_ids):
            _finalize_kernel[(num_reqs,)](
                *table,
                depths,
                root_token_ids.contiguous(),
                *tree,
                size,
                num_nodes,
                min(num_nodes, size) - 1,
                LANES=lanes,
                LANE_BITS=lanes.bit_length() - 1,
                NODES=triton.next_power_of_2(num_nodes),
                num_warps=num_warps(lanes),
                **options(fused=False),
            )
    return tree
