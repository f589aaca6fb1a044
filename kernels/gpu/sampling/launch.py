"""Token choice on a GPU; the reference is `sampling`.

Rows whose token is an argmax of logits, or of logits plus noise, take one pass over the vocabulary (`scores`). Filtered
rows are stored in float32; `nucleus` finds the edges of top-k and top-p, and `filter` the best of the kept tokens. Each
row is shared by as many programs as fill the device, and gets the same token in any batch. Launches depend on shapes
and flags alone.
"""

import torch
from torch import Tensor

from wingbeat.kernels.gpu.sampling.filter import filter_rows
from wingbeat.kernels.gpu.sampling.scores import find_best, scale_rows
from wingbeat.kernels.gpu.sampling.scratch import SamplingWorkspace, rows_of, share_rows
from wingbeat.kernels.sampling.processors import LogitProcessors


def process_logits(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    *,
    any_filtered: bool,
    processors: LogitProcessors | None,
    listed_only: bool = False,
) -> Tensor:
    """Runs `sampling.process_logits`: one launch; with filters 7 launches, or 5 if `listed_only` is set."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return torch.empty(0, vocab_size, dtype=torch.float32, device=logits.device)
    workspace = SamplingWorkspace(num_rows, vocab_size, logits.device, chooses=False)
    # Nothing is chosen, so any integers serve as the noise's seeds and positions.
    rows = rows_of(temperatures, top_ks, top_ps, min_ps, top_ks, top_ks)
    with torch.cuda.device_of(logits):
        shares = share_rows(num_rows, vocab_size)
        scale_rows(logits, rows, processors, workspace, shares, any_filtered=any_filtered, choose=False)
        if any_filtered:
            filter_rows(rows, workspace, shares, None, listed_only=listed_only)
    return workspace.scaled


def best_tokens(logits: Tensor, workspace: SamplingWorkspace | None) -> Tensor:
    """Runs `sampling.best_tokens`."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(out):
        workspace = _room(workspace, logits, scaled=False)
        with torch.cuda.device_of(logits):
            find_best(logits, workspace, share_rows(*logits.shape), out)
    return out


def choose_tokens(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    any_filtered: bool,
    processors: LogitProcessors | None,
    workspace: SamplingWorkspace | None,
    slots: Tensor | None = None,
) -> Tensor:
    """Runs `sampling.choose_tokens`: one launch, or seven with filters."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    workspace = _room(workspace, logits, scaled=any_filtered)
    rows = rows_of(temperatures, top_ks, top_ps, min_ps, seeds, positions, slots=slots)
    shares = share_rows(num_rows, vocab_size)
    with torch.cuda.device_of(logits):
        first = None if any_filtered else out
        scale_rows(logits, rows, processors, workspace, shares, any_filtered=any_filtered, choose=True, out=first)
        if any_filtered:
            filter_rows(rows, workspace, shares, out)
    return out


def _room(workspace: SamplingWorkspace | None, logits: Tensor, *, scaled: bool) -> SamplingWorkspace:
    num_rows, vocab_size = logits.shape
    if workspace is None:
        return SamplingWorkspace(num_rows, vocab_size, logits.device, scaled=scaled)
    if num_rows > workspace.max_rows or vocab_size != workspace.vocab_size:
        raise ValueError(
            f"logits are [{num_rows}, {vocab_size}]: the workspace has room for {workspace.max_rows} rows of "
            f"{workspace.vocab_size}"
        )
    return workspace
