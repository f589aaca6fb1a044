"""Forced acceptance on the device: the walk follows a profile in place of the target's agreement, for benchmarks.

Every kernel of a round runs as ever. Only what the walk compares changes: along the first child of each node the
target's choice becomes that child, for as many levels as are drawn; behind them no child is left to follow.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.sampling.noise import noise_bits
from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.protocol.messages import TokenTree

_NOISE_BITS = 23


class ForcedWalk(NamedTuple):
    """What to walk by; both int64 [num_reqs, num_nodes]."""

    token_ids: Tensor
    """Of the nodes; -1, which nobody chooses, where the walk must not go."""
    target_token_ids: Tensor
    """The target's choices, replaced along the drawn path."""


class AcceptanceForcer:
    """Draws by counter: the length depends on (epoch, position) alone, so replays of a CUDA graph draw anew.

    Args:
        max_depth: of the deepest node.
    """

    def __init__(self, profile: ForcedAcceptance, max_depth: int, device: torch.device) -> None:
        limits = [round(profile.rate(depth) * (1 << _NOISE_BITS)) for depth in range(1, max_depth + 1)]
        self.limits = torch.tensor(limits, dtype=torch.int32, device=device)
        """[max_depth]: a level is accepted where its random bits are below."""
        self._levels = torch.arange(max_depth, device=device)

    def lengths(self, epochs: Tensor, positions: Tensor) -> Tensor:
        """Levels to accept: int64 [num_reqs].

        Args:
            epochs: int64 [num_reqs].
            positions: int64 [num_reqs]: of the roots.
        """
        accepted = noise_bits(epochs, positions, self._levels) < self.limits
        return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)

    def apply(self, tree: TokenTree, targets: Tensor, epochs: Tensor, positions: Tensor) -> ForcedWalk:
        """Replace what the walk compares.

        Args:
            targets: int64 [num_reqs, num_nodes]: the target's choice after each node.
            epochs, positions: as for `lengths`.
        """
        num_nodes = targets.shape[1]
        index = torch.arange(num_nodes, device=targets.device)
        real = (index > 0) & (index < tree.num_valid[:, None])
        parents = tree.parents.clamp(min=0)
        first_child = torch.full_like(parents, num_nodes)
        first_child.scatter_reduce_(1, parents, torch.where(real, index, num_nodes), reduce="amin")
        left = self.lengths(epochs, positions)
        node = torch.zeros_like(tree.parents[:, :1])
        for _ in range(min(len(self._levels), num_nodes - 1)):
            child = first_child.gather(1, node)
            goes = (child < num_nodes) & (left > 0)[:, None]
            child = torch.where(goes, child, 0)
            token = torch.where(goes, tree.token_ids.gather(1, child), targets.gather(1, node))
            targets = targets.scatter(1, node, token)
            node = torch.where(goes, child, node)
            left = left - 1
        behind = real & (tree.parents == node)
        return ForcedWalk(torch.where(behind, -1, tree.token_ids), targets)
