"""Token choice by warped logits plus counter-based Gumbel noise: torch reference and CPU path.

The token of a row is argmax(processed logits + noise(seed, position, token)): an exact sample of softmax(processed
logits) (Gumbel-max trick) that depends on the row alone, not on the batch, the tree or the device's random state.
History, bias and grammar are passed as tensors (`processors`). CUDA tensors use the kernels of `kernels.gpu.sampling`.
"""

from typing import Any

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.kernels.sampling.processors import LogitProcessors, apply_processors

# Number of best tokens of a row on the CPU that are examined before the whole row is sorted. A nucleus of real text is
# rarely larger, and a full sort takes 10 times as long.
_WINDOW = 128


def _filter(logits: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Masks float32 logits [num_rows, vocab_size] by top-k, top-p, then min-p, with one sort; out of place."""
    vocab_size = logits.shape[-1]
    minus_inf = float("-inf")
    # Logits are sorted in ascending order, as in transformers, so that among equal logits at the edge of the nucleus
    # the lowest ids are removed first.
    ranked, order = torch.sort(logits, dim=-1, stable=True)
    kth = (vocab_size - top_ks).clamp(min=0, max=vocab_size - 1)[:, None]
    below_kth = (ranked < ranked.gather(-1, kth)) & (top_ks > 0)[:, None]
    ranked.masked_fill_(below_kth, minus_inf)
    # The sums are computed in double and rounded once, which gives the same numbers as a float32 cumsum on the CPU.
    mass = torch.softmax(ranked, dim=-1).cumsum(dim=-1, dtype=torch.float64).to(torch.float32)
    outside = (mass <= (1.0 - top_ps.double()).to(torch.float32)[:, None]) & (top_ps < 1.0)[:, None]
    outside[:, -1] = False
    removed = torch.empty_like(outside).scatter_(-1, order, outside | below_kth)
    kept = logits.masked_fill(removed, minus_inf)
    probs = torch.softmax(kept, dim=-1)
    return kept.masked_fill_(probs < min_ps[:, None] * probs.amax(dim=-1, keepdim=True), minus_inf)


def _filter_window(logits: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> tuple[Tensor, Tensor]:
    """`_filter` of each row's best _WINDOW tokens; also returns bool [num_rows]: rows for which the window sufficed.

    Each filter keeps the upper end of the ranking, so if the window's last token is removed, all tokens below are
    removed too. If a row has top-k, then top-k must be the filter that removes the last token, because top-p needs the
    total mass of the tokens that top-k keeps, and all of these must be in the window.
    """
    minus_inf = float("-inf")
    ranked, order = logits.topk(_WINDOW, dim=-1)
    best = ranked[:, :1]
    kth = (top_ks - 1).clamp(min=0, max=_WINDOW - 1)[:, None]
    below_kth = (ranked < ranked.gather(-1, kth)) & (top_ks > 0)[:, None]
    weights = (ranked - best).exp().masked_fill(below_kth, 0.0)
    whole = (logits - best).exp().sum(dim=-1, dtype=torch.float64)
    total = torch.where(top_ks > 0, weights.sum(dim=-1, dtype=torch.float64), whole)[:, None]
    # Mass of a token and of all less likely tokens, as in `_filter`, computed as the total mass minus the mass of all
    # more likely tokens.
    mass = 1.0 - (weights.cumsum(dim=-1, dtype=torch.float64) - weights) / total
    outside = (mass.float() <= (1.0 - top_ps.double()).float()[:, None]) & (top_ps < 1.0)[:, None]
    outside[:, 0] = False
    removed = below_kth | outside | (weights < min_ps[:, None])
    kept = torch.full_like(logits, minus_inf).scatter_(-1, order, ranked.masked_fill(removed, minus_inf))
    return kept, removed[:, -1] & ((top_ks == 0) | below_kth[:, -1])


def process_logits(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    *,
    any_filtered: bool = True,
    processors: LogitProcessors | None = None,
    listed_only: bool = False,
) -> Tensor:
    """Warps logits like transformers' warpers, each row by its own temperature, top-k, top-p and min-p.

    Top-k keeps ties with the k-th logit; top-p keeps the smallest set whose mass reaches top_p, at least one token;
    min-p keeps tokens at least min_p times as probable as the best. Rows with temperature 0 are not warped. On a GPU
    masses are summed in fixed point, whose rounding (below 2**-24 of the total) may move the edge of the nucleus, and
    of min-p, by one token if a mass coincides with the edge; among equal logits at the edge the lowest ids are removed
    first.

    Args:
        logits: [num_rows, vocab_size], any float type; not modified.
        temperatures: float32 [num_rows], 0 or more.
        top_ks: int64 [num_rows]; 0 is off.
        top_ps: float32 [num_rows]; 1 is off.
        min_ps: float32 [num_rows]; 0 is off.
        any_filtered: False promises that no row uses top-k, top-p or min-p, which saves the search for their edges.
        processors: applied to every row, warped or not, before temperature.
        listed_only: searches edges only among a row's 128 best tokens in torch, or among about 2000 tokens near the
            edges in the kernels, in few operations of fixed shapes. A row whose edges lie elsewhere is not filtered at
            all in torch, and filtered by min-p alone in the kernels. Meant for drafts, whose filtering does not change
            the text.

    Returns:
        float32 [num_rows, vocab_size], removed tokens at -inf.

    Raises:
        ValueError: see `processors.check_processors`.
    """
    if kernels := choice.compiled("choose_tokens", logits):
        return kernels.process_logits(
            logits,
            temperatures,
            top_ks,
            top_ps,
            min_ps,
            any_filtered=any_filtered,
            processors=processors,
            listed_only=listed_only,
        )
    if processors is not None:
        logits = apply_processors(logits, processors)
    sampled = temperatures > 0
    scaled = logits.to(torch.float32) / torch.where(sampled, temperatures, 1.0)[:, None]
    if not any_filtered:
        return scaled
    filtered = sampled & ((top_ks > 0) | (top_ps < 1.0) | (min_ps > 0))
    if listed_only:
        if logits.shape[-1] > _WINDOW:
            kept, enough = _filter_window(scaled, top_ks, top_ps, min_ps)
            filtered &= enough
        else:
            kept = _filter(scaled, top_ks, top_ps, min_ps)
        return torch.where(filtered[:, None], kept, scaled)
    rows = filtered.nonzero().squeeze(-1)
    if logits.shape[-1] > _WINDOW:
        kept, enough = _filter_window(scaled[rows], top_ks[rows], top_ps[rows], min_ps[rows])
        scaled[rows[enough]] = kept[enough]
        rows = rows[~enough]
    if rows.numel():
        scaled[rows] = _filter(scaled[rows], top_ks[rows], top_ps[rows], min_ps[rows])
    return scaled


def best_tokens(logits: Tensor, workspace: Any = None) -> Tensor:
    """Likeliest token of each row; ties go to the lowest id. Takes a single launch on a GPU.

    Args:
        logits: [num_rows, vocab_size], any float type.
        workspace: as for `choose_tokens`.

    Returns:
        int64 [num_rows].
    """
    if kernels := choice.compiled("choose_tokens", logits):
        return kernels.best_tokens(logits, workspace)
    return logits.argmax(dim=-1)


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
    workspace: Any = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Chooses the token of each row: argmax at temperature 0, else argmax(processed logits + Gumbel noise).

    A row's token does not depend on the other rows. Ties go to the lowest id. On a GPU the host never waits for the
    device, and launches depend on shapes and flags alone, so a call can be captured in a CUDA graph.

    Args:
        logits: [num_rows, vocab_size], any float type.
        temperatures, top_ks, top_ps, min_ps: [num_rows] or [num_slots], as for `process_logits`.
        seeds: int64, likewise.
        positions: int64 [num_rows]: position that the chosen token will have.
        any_sampled: False promises that every temperature is 0.
        any_filtered: False promises that no row uses top-k, top-p or min-p.
        processors: applied to every row, sampled or not.
        workspace: scratch memory of the GPU kernels, from `sampling_workspace`; None allocates it in the call.
        slots: int64 [num_rows]: index of each row's parameters in the five columns above; None if columns are by row.

    Returns:
        int64 [num_rows].

    Raises:
        ValueError: see `processors.check_processors`; or the workspace is too small.
    """
    if (kernels := choice.compiled("choose_tokens", logits)) and (any_sampled or processors is not None):
        return kernels.choose_tokens(
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
            slots=slots,
        )
    if not any_sampled:
        return best_tokens(logits if processors is None else apply_processors(logits, processors), workspace)
    if slots is not None:
        columns = (temperatures, top_ks, top_ps, min_ps, seeds)
        temperatures, top_ks, top_ps, min_ps, seeds = (column[slots] for column in columns)
    processed = process_logits(
        logits, temperatures, top_ks, top_ps, min_ps, any_filtered=any_filtered, processors=processors
    )
    noise = gumbel_noise(seeds, positions, torch.arange(logits.shape[-1], device=logits.device))
    return processed.add_(noise.masked_fill_((temperatures == 0)[:, None], 0.0)).argmax(dim=-1)


def sampling_workspace(max_rows: int, vocab_size: int, device: torch.device | str) -> Any:
    """Scratch memory for `choose_tokens` of up to max_rows rows, shareable between CUDA graphs; None on CPUs."""
    kernels = choice.module_of("choose_tokens") if torch.device(device).type == "cuda" else None
    return None if kernels is None else kernels.SamplingWorkspace(max_rows, vocab_size, device)
