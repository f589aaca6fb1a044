"""Candidate selection on a GPU; the reference is `candidates`.

Programs that share a row find the best candidates of their shares, and the last of them to finish merges the shares.
Rows are shared because a small batch has few rows, and one program per row would leave most of the device idle. With a
level, the last program of a request enters its rows' candidates into the table of the growing tree. The host never
waits for the device, and there is one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.gpu.sampling.noise import gumbel, row_keys
from wingbeat.kernels.gpu.tree.table import Level, level_kernel
from wingbeat.kernels.launching import options, wait_for_launch
from wingbeat.kernels.tree.candidates import new_counters
from wingbeat.kernels.tree.results import Candidates, Coupling, Frontier

# Logits that a program holds in registers at a time: 32 in each thread.
_CANDIDATE_TILE = 8192
_SPLITS = 8
"""Maximum number of programs per row."""
_LEAST_SHARE = 1024


@triton.jit(
    # Levels differ in these numbers and in the address of their masks; compiling takes seconds.
    do_not_specialize=["size", "first_entry", "num_candidates", "num_places", "num_words"],
    do_not_specialize_on_alignment=["itself"],
)
def _candidates_kernel(
    logits,
    draft_token_ids,
    temperatures,
    seeds,
    positions,
    best_scores,
    best_ids,
    maxima,
    totals,
    counters,  # int32 [num_rows + num_reqs or more], all 0 before and after the launch
    out_token_ids,
    out_log_probs,
    parent_entries,  # from here on as in `table.level_kernel`; all None without a level
    parent_scores,
    table_token_ids,
    table_parents,
    table_scores,
    frontier_token_ids,
    frontier_entries,
    frontier_scores,
    frontier_parents,
    visible,
    itself,
    frontier_visible,
    size,
    first_entry,
    num_candidates,
    num_places,
    num_words,
    width,
    vocab_size,
    length,
    top_k,
    IS_ROOT: tl.constexpr,
    LANES: tl.constexpr,
    LANE_BITS: tl.constexpr,
    COUPLED: tl.constexpr,
    SPLITS: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Finds the best candidates of a share of a row, best first; the row's last program merges all shares.

    Also stores the share's largest score, and the sum of exponentials relative to that score.
    """
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * length
    end = tl.minimum(begin + length, vocab_size)
    share = row * tl.num_programs(1) + tl.program_id(1)
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
    ids_of_best = tl.zeros([PLACES], dtype=tl.int32)
    largest = tl.full([], float("-inf"), dtype=tl.float32)
    total = tl.full([], 0.0, dtype=tl.float32)
    for start in range(begin, end, TILE):
        ids = start + lanes
        mask = ids < end
        values = tl.load(logits + row * vocab_size + ids, mask=mask, other=float("-inf")).to(tl.float32)
        # NaN is replaced, because reductions over NaN may return different results in different threads.
        values = tl.where(values >= float("-inf"), values, float("-inf"))
        if COUPLED:
            values = tl.div_rn(values, scale)
            if temperature > 0:
                values += gumbel(key_1, key_2, tl.load(draft_token_ids + ids, mask=mask, other=0))
        before = largest
        largest = tl.maximum(before, tl.max(values, axis=0))
        finite = tl.where(largest == float("-inf"), 0.0, largest)
        total = total * tl.exp(before - finite) + tl.sum(tl.exp(values - finite), axis=0)
        # Merges the tile's best with the best so far; ties go to the earlier id.
        merged = tl.full([PLACES], float("-inf"), dtype=tl.float32)
        merged_ids = tl.zeros([PLACES], dtype=tl.int32)
        for place in range(top_k):
            old, old_at = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
            new, new_at = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
            from_old = old >= new
            old_id = tl.sum(tl.where(places == old_at, ids_of_best, 0), axis=0)
            here = places == place
            merged = tl.where(here, tl.where(from_old, old, new), merged)
            merged_ids = tl.where(here, tl.where(from_old, old_id, start + new_at), merged_ids)
            best = tl.where(places == tl.where(from_old, old_at, -1), float("-inf"), best)
            values = tl.where(lanes == tl.where(from_old, -1, new_at), float("-inf"), values)
        best = merged
        ids_of_best = merged_ids
    tl.store(best_scores + share * PLACES + places, best)
    tl.store(best_ids + share * PLACES + places, ids_of_best)
    tl.store(maxima + share, largest)
    tl.store(totals + share, total)

    tl.debug_barrier()  # the whole share is stored before one thread increments the counter
    num_splits = tl.num_programs(1)
    if tl.atomic_add(counters + row, 1, sem="acq_rel") < num_splits - 1:
        return
    tl.store(counters + row, 0)
    # Shares are in ascending order of ids, and so are equal scores within each share. Therefore ties go to the lower
    # id.
    stored = tl.arange(0, SPLITS * PLACES)
    there = stored < num_splits * PLACES
    stored_at = row * num_splits * PLACES + stored
    scores = tl.load(best_scores + stored_at, mask=there, other=float("-inf"), cache_modifier=".cg")
    stored_ids = tl.load(best_ids + stored_at, mask=there, other=0, cache_modifier=".cg")
    shares = tl.arange(0, SPLITS)
    is_share, share_at = shares < num_splits, row * num_splits + shares
    peaks = tl.load(maxima + share_at, mask=is_share, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(totals + share_at, mask=is_share, other=0.0, cache_modifier=".cg")
    largest = tl.max(peaks, axis=0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    log_total = finite + tl.log(tl.sum(sums * tl.exp(peaks - finite), axis=0))
    best = tl.full([PLACES], float("-inf"), dtype=tl.float32)
    chosen = tl.zeros([PLACES], dtype=tl.int32)
    for place in range(top_k):
        score, at = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
        here = places == place
        best = tl.where(here, score, best)
        chosen = tl.where(here, tl.sum(tl.where(stored == at, stored_ids, 0), axis=0), chosen)
        scores = tl.where(stored == at, float("-inf"), scores)
    wanted = places < top_k
    # A row of NaN has no best candidate, and any lane may be selected. The id is therefore clamped to an existing id.
    chosen = tl.minimum(chosen, vocab_size - 1)
    tl.store(out_token_ids + row * top_k + places, tl.load(draft_token_ids + chosen, mask=wanted), mask=wanted)
    tl.store(out_log_probs + row * top_k + places, best - log_total, mask=wanted)
    if table_scores is not None:
        tl.debug_barrier()  # as above, for the request's rows
        req_counter = counters + tl.num_programs(0) + row // width
        if tl.atomic_add(req_counter, 1, sem="acq_rel") < width - 1:
            return
        tl.store(req_counter, 0)
        level_kernel(
            out_token_ids, out_log_probs, parent_entries, parent_scores, table_token_ids, table_parents, table_scores,
            frontier_token_ids, frontier_entries, frontier_scores, frontier_parents, visible, itself, frontier_visible,
            size, first_entry, num_candidates, num_places, num_words, width, IS_ROOT, LANES, LANE_BITS, False,
        )  # fmt: skip


def top_candidates(
    logits: Tensor, draft_token_ids: Tensor, top_k: int, coupling: Coupling | None, counters: Tensor | None = None
) -> Candidates:
    """Runs `candidates.top_candidates`; ties go to the lower draft index."""
    return grown_candidates(logits, draft_token_ids, top_k, coupling, counters, None)[0]


def grown_candidates(
    logits: Tensor,
    draft_token_ids: Tensor,
    top_k: int,
    coupling: Coupling | None,
    counters: Tensor | None,
    level: Level | None,
) -> tuple[Candidates, Frontier | None]:
    """Runs `candidates.top_candidates`, and `TreeTable.add_level` if a level is given."""
    num_reqs, width, vocab_size = logits.shape
    num_rows, places = num_reqs * width, triton.next_power_of_2(top_k)
    token_ids = torch.empty(num_reqs, width, top_k, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(num_reqs, width, top_k, dtype=torch.float32, device=logits.device)
    frontier, given, constants = None, (None,) * 12 + (0,) * 5, {"IS_ROOT": True, "LANES": 1, "LANE_BITS": 0}
    if level is not None:
        frontier, given, constants = level.arguments(width * top_k, top_k)
    if num_rows == 0:
        return Candidates(token_ids, log_probs), frontier
    temperatures, seeds, positions = (
        (None, None, None) if coupling is None else (column.contiguous() for column in coupling)
    )
    length = max(triton.cdiv(vocab_size, _SPLITS), min(_LEAST_SHARE, vocab_size))
    num_splits = triton.cdiv(vocab_size, length)
    tile = min(triton.next_power_of_2(length), _CANDIDATE_TILE)
    best_scores, best_ids = (
        torch.empty(num_rows, num_splits, places, dtype=dtype, device=logits.device)
        for dtype in (torch.float32, torch.int32)
    )
    maxima, totals = torch.empty(2, num_rows, num_splits, dtype=torch.float32, device=logits.device)
    if counters is None or len(counters) < num_rows + num_reqs:
        counters = new_counters(num_rows + num_reqs, logits.device)
    with torch.cuda.device_of(logits):
        _candidates_kernel[(num_rows, num_splits)](
            logits.contiguous(),
            draft_token_ids.contiguous(),
            temperatures,
            seeds,
            positions,
            best_scores,
            best_ids,
            maxima,
            totals,
            counters,
            token_ids,
            log_probs,
            *given,
            width,
            vocab_size,
            length,
            top_k,
            **constants,
            COUPLED=coupling is not None,
            SPLITS=triton.next_power_of_2(num_splits),
            PLACES=places,
            TILE=tile,
            num_warps=max(tile // 1024, 4),
            **options(fused=False),
        )
    return Candidates(token_ids, log_probs), frontier
