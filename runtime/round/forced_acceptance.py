"""Forced acceptance on the device: walks follow a profile in place of the target's agreement, for benchmarks.

Every kernel of a round runs as ever, but for the walk: along the first child of each node, for as many levels as are
drawn.
"""

import logging

import torch
from torch import Tensor

from wingbeat.kernels.tree.forced import NOISE_BITS, Draws
from wingbeat.runtime.config import ForcedAcceptance

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

    def draws(self, slots: Tensor, roots: Tensor) -> Draws:
        """Draws of a round.

        Args:
            slots, roots: int64 [num_reqs]: of the sequences, and the positions of their roots.
        """
        return Draws(self.limits, self._epochs, slots, roots)
