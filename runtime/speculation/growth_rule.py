"""Rule by which a drafter stops growing a tree, evaluated after each level."""

import numpy as np

from wingbeat.runtime.speculation.acceptance import along_rows, given_parent
from wingbeat.runtime.speculation.policy import GrowthLimits


class GrowthRule:
    """Decides whether growing another level of a draft's trees is worth its cost.

    Args:
        growth: limits from the policy.
        table: [num_reqs, NUM_BINS]: row of `Acceptance.table` for each request.
    """

    def __init__(self, growth: GrowthLimits, table: np.ndarray) -> None:
        self.growth = growth
        self.table = table
        self._paths = np.ones((len(table), 1))
        """Probability that a node and its ancestors are accepted, for the nodes that are expanded next."""

    def pays(self, log_probs: np.ndarray, chosen: np.ndarray) -> bool:
        """Returns whether another level is worth its cost; called once for every depth, from 1 on.

        Args:
            log_probs: [num_reqs, frontier, top_k]: candidates' log-probabilities, conditional on their parents.
            chosen: int64 [num_reqs, kept]: candidates of each request that are expanded next.
        """
        paths = self._paths[:, :, None] * given_parent(self.table, log_probs)
        self._paths = along_rows(paths.reshape(len(paths), -1), chosen)
        return float(np.maximum(self._paths - self.growth.price, 0.0).sum()) > self.growth.min_reach
