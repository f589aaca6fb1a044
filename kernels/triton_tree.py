"""Token trees on a GPU: the kernels behind `tree`, which is their reference, one launch for each of its functions.

A program handles a request (or a row of logits) alone, in registers; trees are small, so what counts is the number of
launches. Nothing waits for the device and launches depend on shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.tree import Candidates, Coupling, Frontier, GrownTree, PackedTree, WalkResult
from wingbeat.kernels.triton_noise import gumbel, row_keys
from wingbeat.kernels.triton_sortable import sortable

# Logits a program holds in registers at a time: 32 in each of its threads.
_CANDIDATE_TILE = 16384
_WORD_BITS = tl.constexpr(64)


def _num_warps(lanes: int) -> int:
    """Four elements a thread, so that what fits one warp needs no barrier."""
    return min(max(triton.next_power_of_2(lanes) // 128, 1), 16)


@triton.jit
def _candidates_kernel(
    logits,
    draft_token_ids,
    temperatures,
    seeds,
    positions,
    out_token_ids,
    out_log_probs,
    width,
    vocab_size,
    top_k,
    COUPLED: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = 0.0
    key_1 = tl.full([], 0, dtype=tl.uint32)
    key_2 = tl.full([], 0, dtype=tl.uint32)
    if COUPLED:
        req = row // width
        temperature = tl.load(temperatures + req)
        key_1, key_2 = row_keys(tl.load(seeds + req), tl.load(positions + req))
    scale = tl.where(temperature > 0, temperature, 1.0)
    lanes = tl.arange(0, TILE)
    places = tl.arange(0, PLACES)
    best = tl.full([PLACES], float("-inf"), dtype=tl.float32)
    best_ids = tl.zeros([PLACES], dtype=tl.int32)
    largest = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.full([], 0.0, dtype=tl.float32)
    for start in range(0, vocab_size, TILE):
        ids = start + lanes
        mask = ids < vocab_size
        values = tl.load(logits + row * vocab_size + ids, mask=mask, other=float("-inf")).to(tl.float32)
        if COUPLED:
            values = tl.div_rn(values, scale)
            if temperature > 0:
                values += gumbel(key_1, key_2, tl.load(draft_token_ids + ids, mask=mask, other=0))
        before = largest
        largest = tl.maximum(before, tl.max(values, axis=0))
        finite = tl.where(largest == float("-inf"), 0.0, largest)
        total = total * tl.exp(before - finite) + tl.sum(tl.exp(values - finite), axis=0)
        # The tile's best and the best so far, merged; of equal scores the earlier id comes first.
        merged = tl.full([PLACES], float("-inf"), dtype=tl.float32)
        merged_ids = tl.zeros([PLACES], dtype=tl.int32)
        for place in range(top_k):
            old, old_at = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
            new, new_at = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
            from_old = old >= new
            old_id = tl.sum(tl.where(places == old_at, best_ids, 0), axis=0)
            here = places == place
            merged = tl.where(here, tl.where(from_old, old, new), merged)
            merged_ids = tl.where(here, tl.where(from_old, old_id, start + new_at), merged_ids)
            best = tl.where(places == tl.where(from_old, old_at, -1), float("-inf"), best)
            values = tl.where(lanes == tl.where(from_old, -1, new_at), float("-inf"), values)
        best = merged
        best_ids = merged_ids
    wanted = places < top_k
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(out_token_ids + row * top_k + places, tl.load(draft_token_ids + best_ids, mask=wanted), mask=wanted)
    tl.store(out_log_probs + row * top_k + places, best - (finite + tl.log(total)), mask=wanted)


def top_candidates(logits: Tensor, draft_token_ids: Tensor, top_k: int, coupling: Coupling | None) -> Candidates:
    """See `tree.top_candidates`; of equal scores the lower draft index comes first."""
    num_reqs, width, vocab_size = logits.shape
    token_ids = torch.empty(num_reqs, width, top_k, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(num_reqs, width, top_k, dtype=torch.float32, device=logits.device)
    if num_reqs * width:
        temperatures, seeds, positions = (
            (None, None, None) if coupling is None else (column.contiguous() for column in coupling)
        )
        tile = min(triton.next_power_of_2(vocab_size), _CANDIDATE_TILE)
        with torch.cuda.device_of(logits):
            _candidates_kernel[(num_reqs * width,)](
                logits.contiguous(),
                draft_token_ids.contiguous(),
                temperatures,
                seeds,
                positions,
                token_ids,
                log_probs,
                width,
                vocab_size,
                top_k,
                COUPLED=coupling is not None,
                PLACES=triton.next_power_of_2(top_k),
                TILE=tile,
                num_warps=min(max(tile // 1024, 4), 16),
                enable_fp_fusion=False,
            )
    return Candidates(token_ids, log_probs)


@triton.jit
def _level_kernel(
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
    size,
    begin,
    num_candidates,
    top_k,
    IS_ROOT: tl.constexpr,
    LANES: tl.constexpr,
    LANE_BITS: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    mask = lanes < num_candidates
    tokens = tl.load(token_ids + req * num_candidates + lanes, mask=mask, other=0)
    scores = tl.load(log_probs + req * num_candidates + lanes, mask=mask, other=float("-inf")).to(tl.float32)
    # NaN is a missing candidate, and a child never beats its parent.
    scores = tl.where(scores == scores, scores, float("-inf"))  # noqa: PLR0124
    scores = tl.where(scores > 0, 0.0, scores)
    place = lanes // top_k
    parents = tl.zeros([LANES], dtype=tl.int64)
    if not IS_ROOT:
        parents = tl.load(parent_entries + req * top_k + place, mask=mask, other=0)
        scores = tl.load(parent_scores + req * top_k + place, mask=mask, other=float("-inf")) + scores
    else:
        # Levels of an earlier tree that this one may not reach must not be kept.
        for start in range(begin + num_candidates, size, LANES):
            rest = start + lanes
            tl.store(table_scores + req * size + rest, float("-inf"), mask=rest < size)
    entries = begin + lanes
    tl.store(table_token_ids + req * size + entries, tokens, mask=mask)
    tl.store(table_parents + req * size + entries, parents, mask=mask)
    tl.store(table_scores + req * size + entries, scores, mask=mask)
    # Unique keys: of equal scores the lower lane is the larger key. -0 and 0 are equal.
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


def add_level(
    token_ids: Tensor,
    log_probs: Tensor,
    frontier: Frontier | None,
    table: tuple[Tensor, Tensor, Tensor],
    begin: int,
) -> Frontier:
    """Enter candidates [num_reqs, width, top_k] at entry `begin` and choose the next frontier; see `TreeTable`.

    Args:
        frontier: the one that was expanded; None for the root's children.
        table: token ids, parents and scores [num_reqs, size].
    """
    num_reqs, width, top_k = token_ids.shape
    token_out, entries, parents = (
        torch.empty(num_reqs, top_k, dtype=torch.int64, device=token_ids.device) for _ in range(3)
    )
    scores = torch.empty(num_reqs, top_k, dtype=torch.float32, device=token_ids.device)
    lanes = triton.next_power_of_2(width * top_k)
    if num_reqs:
        with torch.cuda.device_of(token_ids):
            _level_kernel[(num_reqs,)](
                token_ids.contiguous(),
                log_probs.contiguous(),
                None if frontier is None else frontier.table_index,
                None if frontier is None else frontier.scores,
                *table,
                token_out,
                entries,
                scores,
                parents,
                table[0].shape[1],
                begin,
                width * top_k,
                top_k,
                IS_ROOT=frontier is None,
                LANES=lanes,
                LANE_BITS=lanes.bit_length() - 1,
                num_warps=_num_warps(lanes),
                enable_fp_fusion=False,
            )
    return Frontier(token_out, entries, scores, parents)


@triton.jit
def _finalize_kernel(
    table_token_ids,
    table_parents,
    table_scores,
    table_depths,
    root_token_ids,
    root_positions,
    out_token_ids,
    out_parents,
    out_depths,
    out_scores,
    out_num_valid,
    out_words,
    out_positions,
    size,
    num_nodes,
    num_kept,
    num_words,
    steps,
    PACK: tl.constexpr,
    LANES: tl.constexpr,
    LANE_BITS: tl.constexpr,
    NODES: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    entered = lanes < size
    is_root = lanes == 0
    scores = tl.load(table_scores + req * size + lanes, mask=entered & (lanes > 0), other=float("-inf"))
    parents = tl.load(table_parents + req * size + lanes, mask=entered & (lanes > 0), other=0).to(tl.int32)
    # Unique keys: of equal scores the lower entry is the larger key. -0 and 0 are equal.
    keys = (sortable(tl.where(scores == 0, 0.0, scores)).to(tl.int64) << LANE_BITS) | (LANES - 1 - lanes)
    keys = tl.where(entered & (lanes > 0), keys, -1)
    # The num_kept-th largest key, bit by bit; above every key where none is kept.
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
    if PACK:
        root_position = tl.load(root_positions + req)
        tl.store(out_positions + to, root_position + depths, mask=live)
        tl.store(out_positions + pad_to, root_position + zeros, mask=padding)
        for word in range(num_words):
            ancestors = lanes
            bits = tl.zeros([LANES], dtype=tl.int64)
            for _ in range(steps + 1):
                number = tl.gather(numbers, ancestors, 0).to(tl.int64)
                bits |= tl.where(number // _WORD_BITS == word, _bit(number), 0)
                ancestors = tl.gather(parents, ancestors, 0)
            tl.store(out_words + to * num_words + word, bits, mask=live)
            own = nodes.to(tl.int64)
            # Padding hangs from the root.
            seen = tl.where(own // _WORD_BITS == word, _bit(own), 0) | tl.where(word == 0, _bit(zeros), 0)
            tl.store(out_words + pad_to * num_words + word, seen, mask=padding)


@triton.jit
def _bit(columns):
    """The word that holds a column alone, for int64 columns."""
    return tl.full([], 1, dtype=tl.int64) << (columns & (_WORD_BITS - 1))


def finalize(
    table: tuple[Tensor, Tensor, Tensor],
    depths: Tensor,
    root_token_ids: Tensor,
    num_nodes: int,
    steps: int,
    root_positions: Tensor | None,
) -> PackedTree:
    """The best nodes of a table, renumbered; see `TreeTable.finalize_packed`.

    Args:
        table: token ids, parents and scores [num_reqs, size].
        depths: int64 [size].
        steps: depth of the deepest entry.
        root_positions: int64 [num_reqs]; None leaves the words and positions empty.
    """
    num_reqs, size = table[0].shape
    pack = root_positions is not None
    num_words = triton.cdiv(num_nodes, _WORD_BITS.value) if pack else 0

    def empty(*shape: int) -> Tensor:
        return torch.empty(num_reqs, *shape, dtype=torch.int64, device=root_token_ids.device)

    tree = GrownTree(
        empty(num_nodes),
        empty(num_nodes),
        empty(num_nodes),
        torch.empty(num_reqs, num_nodes, dtype=torch.float32, device=root_token_ids.device),
        empty(),
    )
    words, positions = empty(num_nodes, num_words), empty(num_nodes if pack else 0)
    lanes = triton.next_power_of_2(size)
    if num_reqs:
        with torch.cuda.device_of(root_token_ids):
            _finalize_kernel[(num_reqs,)](
                *table,
                depths,
                root_token_ids.contiguous(),
                root_positions.contiguous() if pack else None,
                *tree,
                words,
                positions,
                size,
                num_nodes,
                min(num_nodes, size) - 1,
                num_words,
                steps,
                PACK=pack,
                LANES=lanes,
                LANE_BITS=lanes.bit_length() - 1,
                NODES=triton.next_power_of_2(num_nodes),
                num_warps=_num_warps(lanes),
            )
    return PackedTree(tree, words, positions)


@triton.jit
def _walk_kernel(
    token_ids,
    parents,
    num_valid,
    target_token_ids,
    out_nodes,
    out_num_tokens,
    out_token_ids,
    num_nodes,
    max_path,
    NODES: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, NODES)
    mask = nodes < num_nodes
    at = req * num_nodes
    tokens = tl.load(token_ids + at + nodes, mask=mask, other=0)
    up = tl.maximum(tl.load(parents + at + nodes, mask=mask, other=0), 0)
    counts = mask & (nodes > 0) & (nodes < tl.load(num_valid + req))
    node = tl.full([], 0, dtype=tl.int32)
    length = tl.full([], 1, dtype=tl.int64)
    walking = tl.full([], 1, dtype=tl.int32) > 0
    for step in range(max_path):
        target = tl.load(target_token_ids + at + node)
        tl.store(out_nodes + req * max_path + step, node.to(tl.int64))
        tl.store(out_token_ids + req * max_path + step, tl.where(walking, target, 0))
        child = tl.min(tl.where(counts & (up == node) & (tokens == target), nodes, num_nodes), axis=0)
        # A node without a chosen child stays without one: the walk cannot resume.
        walking = (child < num_nodes) & (step + 1 < max_path)
        node = tl.where(walking, child, node)
        length += walking.to(tl.int64)
    tl.store(out_num_tokens + req, length)


def walk_tree(
    token_ids: Tensor, parents: Tensor, num_valid: Tensor, target_token_ids: Tensor, max_path: int
) -> WalkResult:
    """See `tree.walk_tree`."""
    num_reqs, num_nodes = token_ids.shape
    nodes, tokens = (torch.empty(num_reqs, max_path, dtype=torch.int64, device=token_ids.device) for _ in range(2))
    num_tokens = torch.empty(num_reqs, dtype=torch.int64, device=token_ids.device)
    lanes = triton.next_power_of_2(num_nodes)
    if num_reqs:
        with torch.cuda.device_of(token_ids):
            _walk_kernel[(num_reqs,)](
                token_ids.contiguous(),
                parents.contiguous(),
                num_valid.contiguous(),
                target_token_ids.contiguous(),
                nodes,
                num_tokens,
                tokens,
                num_nodes,
                max_path,
                NODES=lanes,
                num_warps=_num_warps(lanes),
            )
    return WalkResult(nodes, num_tokens, tokens)


@triton.jit
def _ancestors_kernel(
    parents, out_mask, out_words, num_nodes, num_words, max_depth, PACK: tl.constexpr, ROWS: tl.constexpr
):
    """One word of the ancestors of ROWS nodes, stored as it is or as its 64 columns."""
    req = tl.program_id(0).to(tl.int64)
    word = tl.program_id(2)
    nodes = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = nodes < num_nodes
    at = req * num_nodes
    ancestors = tl.where(mask, nodes, 0).to(tl.int64)
    bits = tl.where(ancestors // _WORD_BITS == word, _bit(ancestors), 0)
    for _ in range(max_depth):
        ancestors = tl.maximum(tl.load(parents + at + ancestors), 0)
        bits |= tl.where(ancestors // _WORD_BITS == word, _bit(ancestors), 0)
    if PACK:
        tl.store(out_words + (at + nodes) * num_words + word, bits, mask=mask)
    else:
        columns = word * _WORD_BITS + tl.arange(0, _WORD_BITS)
        seen = (bits[:, None] >> tl.arange(0, _WORD_BITS).to(tl.int64)[None, :]) & 1
        to = (at + nodes)[:, None] * num_nodes + columns[None, :]
        tl.store(out_mask + to, seen.to(tl.uint8), mask=mask[:, None] & (columns < num_nodes)[None, :])


def ancestors(parents: Tensor, max_depth: int | None, *, pack: bool) -> Tensor:
    """See `tree.ancestor_mask`; packed as `tree.ancestor_words`."""
    num_reqs, num_nodes = parents.shape
    num_words = triton.cdiv(num_nodes, _WORD_BITS.value)
    shape, dtype = (num_words, torch.int64) if pack else (num_nodes, torch.uint8)
    out = torch.empty(num_reqs, num_nodes, shape, dtype=dtype, device=parents.device)
    rows = min(triton.next_power_of_2(num_nodes), 64)
    if out.numel():
        with torch.cuda.device_of(parents):
            _ancestors_kernel[(num_reqs, triton.cdiv(num_nodes, rows), num_words)](
                parents.contiguous(),
                out,
                out,
                num_nodes,
                num_words,
                num_nodes - 1 if max_depth is None else max_depth,
                PACK=pack,
                ROWS=rows,
            )
    return out if pack else out.view(torch.bool)


@triton.jit
def _paths_kernel(token_ids, parents, out, num_nodes, max_depth, ROWS: tl.constexpr):
    req = tl.program_id(0).to(tl.int64)
    nodes = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = nodes < num_nodes
    at = req * num_nodes
    ancestors = tl.where(mask, nodes, 0).to(tl.int64)
    for step in range(max_depth):
        tokens = tl.where(ancestors > 0, tl.load(token_ids + at + ancestors), -1)
        tl.store(out + (at + nodes) * max_depth + step, tokens, mask=mask)
        ancestors = tl.maximum(tl.load(parents + at + ancestors), 0)


def path_token_ids(token_ids: Tensor, parents: Tensor, max_depth: int) -> Tensor:
    """See `tree.path_token_ids`."""
    num_reqs, num_nodes = token_ids.shape
    out = torch.empty(num_reqs, num_nodes, max_depth, dtype=torch.int64, device=token_ids.device)
    rows = min(triton.next_power_of_2(num_nodes), 64)
    if out.numel():
        with torch.cuda.device_of(token_ids):
            _paths_kernel[(num_reqs, triton.cdiv(num_nodes, rows))](
                token_ids.contiguous(), parents.contiguous(), out, num_nodes, max_depth, ROWS=rows
            )
    return out
