"""Rule by which a drafter stops growing a tree, evaluated after each level."""

import numpy as np
import torch

from wingbeat.runtime.adaptive.acceptance import along_rows, given_parent
from wingbeat.runtime.adaptive.policy import GrowthLimits
from wingbeat.runtime.drafters.base import GrowthRule
from wingbeat.runtime.protocol.messages import Outcome, RoundHeader


class AcceptanceRule(GrowthRule):
    """Growth rule based on the acceptance table and the limits of the policy.

    Args:
        growth: limits from the policy.
        table: [num_reqs, NUM_BINS]: row of `Acceptance.table` for each request.
    """

    def __init__(self, growth: GrowthLimits, table: np.ndarray) -> None:
        self.growth = growth
        self.table = table
        self._paths = np.ones((len(table), 1))
        """P(node and its ancestors are accepted), for the nodes that are expanded next."""

    def pays(self, log_probs: np.ndarray, chosen: np.ndarray) -> bool:
        """See `GrowthRule.pays`."""
        paths = self._paths[:, :, None] * given_parent(self.table, log_probs)
        self._paths = along_rows(paths.reshape(len(paths), -1), chosen)
        return float(np.maximum(self._paths - self.growth.price, 0.0).sum()) > self.growth.min_reach


def growth_rule(outcome: Outcome, header: RoundHeader) -> AcceptanceRule | None:
    """Growth rule of the requested trees, from an outcome in host memory; None if every level is to be grown."""
    if not header.has_rule:
        return None
    sampled = outcome.temperatures[outcome.proposal_slots[: header.num_proposals]] > 0
    growth = GrowthLimits(*outcome.growth_limits.tolist())
    return AcceptanceRule(growth, outcome.acceptance_table.numpy()[sampled.to(torch.int64).numpy()])
