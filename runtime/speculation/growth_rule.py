"""When a drafter stops to grow a tree: the policy's numbers, applied where the levels are made."""

import numpy as np

from wingbeat.runtime.speculation.acceptance import along_rows, given_parent
from wingbeat.runtime.speculation.policy import GrowthLimits


class GrowthRule:
    """Whether to grow another level of the trees of one draft.

    Args:
        growth: where they stop.
        table: [num_reqs, NUM_BINS]: each request's row of `Acceptance.table`.
    """

    def __init__(self, growth: GrowthLimits, table: np.ndarray) -> None:
        self.growth = growth
        self.table = table
        self._paths = np.ones((len(table), 1))
        """P(it and its ancestors are accepted), of the nodes that are expanded next."""

    def pays(self, log_probs: np.ndarray, chosen: np.ndarray) -> bool:
        """Whether another level is worth its time; asked at every depth, from 1 on.

        Args:
            log_probs: of the candidates [num_reqs, frontier, top_k], given their parents.
            chosen: int64 [num_reqs, kept]: which of a request's candidates are expanded next.
        """
        paths = self._paths[:, :, None] * given_parent(self.table, log_probs)
        self._paths = along_rows(paths.reshape(len(paths), -1), chosen)
        return float(np.maximum(self._paths - self.growth.price, 0.0).sum()) > self.growth.min_reach
