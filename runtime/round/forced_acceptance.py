"""Forced acceptance for benchmarks: draws the number of accepted levels from a profile.

Drafts are not compared with the target's tokens.

All kernels of a round run as usual except the walk along the tree, which follows each node's first child for the drawn
number of levels.
"""

import logging

import torch
from torch import Tensor

from wingbeat.kernels.tree.forced import NOISE_BITS, Draws
from wingbeat.runtime.config import ForcedAcceptance

logger = logging.getLogger(__name__)


class AcceptanceForcer:
    """Draws accepted lengths with a counter-based generator: a length depends only on epoch and position of a sequence.

    Args:
        max_depth: depth of the deepest node of a tree.
        epochs: int64 [num_slots].
    """

    def __init__(self, profile: ForcedAcceptance, max_depth: int, epochs: Tensor) -> None:
        limits = [round(profile.rate(depth) * (1 << NOISE_BITS)) for depth in range(1, max_depth + 1)]
        self.limits = torch.tensor(limits, dtype=torch.int32, device=epochs.device)
        """int32 [max_depth]: a level of the tree is accepted if the random bits drawn for it are below its limit."""
        self._epochs = epochs
        logger.warning(
            "forced_acceptance %s: accepted lengths are random draws, so the generated text is not the model's", profile
        )

    def draws(self, slots: Tensor, roots: Tensor) -> Draws:
        """Returns the draws of a round.

        Args:
            slots: int64 [num_reqs], slots of the sequences.
            roots: int64 [num_reqs], positions of their roots.
        """
        return Draws(self.limits, self._epochs, slots, roots)
