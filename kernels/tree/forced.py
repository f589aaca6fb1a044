"""Forced acceptance, for benchmarks: a walk whose length is drawn at random instead of decided by the target.

Torch reference.

The walk follows first children for the drawn number of levels, and emits the target's choice after the last accepted
node. On GPUs the kernel that settles paths, in `kernels.gpu.round`, performs the walk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.sampling.noise import noise_bits
from wingbeat.kernels.tree.results import WalkResult

NOISE_BITS = 23


class Draws(NamedTuple):
    """Source of drawn lengths.

    Lengths depend on (epoch, position) alone, so that replays of a CUDA graph draw new lengths.
    """

    limits: Tensor
    """int32 [max_depth]: a level is accepted if its random bits are below its limit."""
    epochs: Tensor
    """int64 [num_slots]."""
    slots: Tensor
    """int64 [num_reqs]."""
    positions: Tensor
    """int64 [num_reqs]: positions of the roots."""


def drawn_lengths(draws: Draws) -> Tensor:
    """Number of levels to accept, if the tree is deep enough: int64 [num_reqs]."""
    levels = torch.arange(len(draws.limits), device=draws.limits.device)
    accepted = noise_bits(draws.epochs[draws.slots], draws.positions, levels) < draws.limits
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


def forced_walk(
    token_ids: Tensor, parents: Tensor, num_valid: Tensor, target_token_ids: Tensor, draws: Draws, max_path: int
) -> WalkResult:
    """Walks along first children. Arguments other than `draws` are those of `reference.walk_tree`."""
    num_nodes = token_ids.shape[1]
    index = torch.arange(num_nodes, device=token_ids.device)
    counts = (index > 0) & (index < num_valid[:, None])
    first_child = torch.full_like(parents, num_nodes)
    first_child.scatter_reduce_(1, parents.clamp(min=0), torch.where(counts, index, num_nodes), reduce="amin")
    lengths, num_tokens = drawn_lengths(draws)[:, None], torch.ones_like(parents[:, :1])
    path = [torch.zeros_like(num_tokens)]
    for step in range(1, max_path):
        child = first_child.gather(1, path[-1])
        goes = (child < num_nodes) & (step <= lengths) & (step == num_tokens)
        path.append(torch.where(goes, child, path[-1]))
        num_tokens = num_tokens + goes.to(torch.int64)
    nodes, steps = torch.cat(path, dim=1), torch.arange(max_path, device=token_ids.device)
    drafted = torch.nn.functional.pad(token_ids.gather(1, nodes)[:, 1:], (0, 1))
    emitted = torch.where(steps < num_tokens - 1, drafted, target_token_ids.gather(1, nodes))
    return WalkResult(nodes, num_tokens[:, 0], emitted.masked_fill_(steps >= num_tokens, 0))
