"""Candidates on a GPU: the kernel behind `candidates`, which is its reference.

A program handles a row of logits alone, in registers. Nothing waits for the device and launches depend on shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wingbeat.kernels.sampling.noise_triton import gumbel, row_keys
from wingbeat.kernels.tree.results import Candidates, Coupling

# Logits a program holds in registers at a time: 32 in each of its threads.
_CANDIDATE_TILE = 16384


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
    # A row of NaN has no best one, and may leave any lane's: what is looked up by it must exist.
    best_ids = tl.minimum(best_ids, vocab_size - 1)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(out_token_ids + row * top_k + places, tl.load(draft_token_ids + best_ids, mask=wanted), mask=wanted)
    tl.store(out_log_probs + row * top_k + places, best - (finite + tl.log(total)), mask=wanted)


def top_candidates(logits: Tensor, draft_token_ids: Tensor, top_k: int, coupling: Coupling | None) -> Candidates:
    """See `candidates.top_candidates`; of equal scores the lower draft index comes first."""
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
