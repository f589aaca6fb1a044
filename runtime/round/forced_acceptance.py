"""Forced acceptance on the device: walks follow a profile in place of the target's agreement, for benchmarks.

Every kernel of a round runs as ever, but for the walk: along the first child of each node, for as many levels as are
drawn.
"""

import logging

import torch
from torch import Tensor

from wingbeat.kernels.tree.forced import NOISE_BITS, Draws, forced_walk
from wingbeat.kernels.tree.results import GrownTree, WalkResult
from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.protocol.messages import TokenTree

logger = logging.getLogger(__name__)


class AcceptanceForcer:
    """Draws by counter: a length depends on (epoch, position) alone.

    Args:
        max_depth: of the deepest node.
        epochs: int64 [num_slots]
    """

    def __init__(self, profile: ForcedAcceptance, max_depth: int, epochs: Tensor) -> None:
        limits = [round(profile.rate(depth) * (1 << NOISE_BITS)) for depth in range(1, max_depth + 1)]
        self.limits = torch.tensor(limits, dtype=torch.int32, device=epochs.device)
        """[max_depth]: a level is accepted where its random bits are below."""
        self._epochs = epochs
        logger.warning("forced_acceptance %s: what is accepted is drawn, and no text is the model's", profile)

    def walk(self, tree: TokenTree, targets: Tensor, slots: Tensor, roots: Tensor, max_path: int) -> WalkResult:
        """`tree.reference.walk_tree` of these lengths.

        Args:
            targets: int64 [num_reqs, num_nodes]: the target's choice after each node.
            slots, roots: int64 [num_reqs]: of the sequences, and the positions of their roots.
        """
        draws = Draws(self.limits, self._epochs, slots, roots)
        return forced_walk(tree.token_ids, tree.parents, tree.num_valid, targets, draws, max_path)


def along(tree: GrownTree, targets: Tensor, walk: WalkResult) -> tuple[GrownTree, Tensor]:
    """Trees and choices [num_reqs * num_nodes] along which a walk by choices goes as a drawn one went."""
    num_nodes = targets.shape[1]
    on_path = torch.zeros_like(tree.token_ids, dtype=torch.bool).scatter_(1, walk.nodes, True)
    inside = torch.arange(walk.nodes.shape[1], device=targets.device) < walk.num_tokens[:, None]
    chosen = torch.cat([targets, targets[:, :1]], dim=1)  # with a place for what is behind a path
    chosen.scatter_(1, torch.where(inside, walk.nodes, num_nodes), walk.token_ids)
    return tree._replace(token_ids=tree.token_ids.where(on_path, -1)), chosen[:, :num_nodes].flatten()
