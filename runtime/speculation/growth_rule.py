"""The drafter's part of adaptive speculation: whether to grow another level, by the verifier's tables."""

from typing import NamedTuple

import numpy as np

from wingbeat.runtime.protocol.messages import Outcome, RoundHeader
from wingbeat.runtime.speculation.acceptance import clipped, confidence_bins, given_parent


class RuleTables(NamedTuple):
    """What a verifier's rule is made of, the same for many rounds: read once for each time it is written."""

    number: int
    """Of the rule; 0 grows every level."""
    min_reach: list[float]
    """[max_depth + 1]: sum at each depth that makes the next level worth its time. Summed is by how much each path
    probability exceeds the price, since a node that is not worth verifying costs nothing."""
    node_price: list[float]
    """[max_depth + 1]: path probability at each depth from which on a child is worth verifying."""
    by_confidence: list[list[float]]
    """[2][NUM_BINS]: see `wingbeat.runtime.speculation.acceptance.AcceptanceTracker.table`."""
    depth_factors: list[float]
    """[max_depth + 1]"""
    request_factors: list[float]
    """[num_slots]"""

    @classmethod
    def read(cls, outcome: Outcome, known: "RuleTables | None" = None) -> "RuleTables":
        """Of an outcome in host memory; `known` itself where that is what it says."""
        number = RoundHeader.read(outcome.header).rule_number
        if known is not None and number == known.number:
            return known
        parts = (
            outcome.min_reach,
            outcome.node_price,
            outcome.acceptance_table,
            outcome.depth_factors,
            outcome.request_factors,
        )
        return cls(number, *(part.tolist() for part in parts))


class GrowthRule:
    """One verifier's rule for the trees of one draft.

    Args:
        slots: of the requests, which are its proposals.
        sampled: by request, whether its temperature is above 0.
    """

    def __init__(self, tables: RuleTables, slots: list[int], sampled: list[bool]) -> None:
        self._tables = tables
        self._factors = [tables.request_factors[slot] for slot in slots]
        self._sampled = sampled
        self._by_confidence = [tables.by_confidence[kind] for kind in sampled]
        self._chain_paths = [1.0] * len(slots)
        """P(all tokens so far are accepted), by chain."""
        self._paths = np.ones((len(slots), 1))
        """The same of the nodes that are expanded next."""

    def pays_for_chains(self, log_probs: list[float], depth: int) -> bool:
        """`pays` of chains, in plain numbers.

        Args:
            log_probs: of each request's token at `depth`, given its parent.
        """
        tables, paths, reach = self._tables, self._chain_paths, 0.0
        by_depth, price = tables.depth_factors[depth], tables.node_price[depth]
        for row, log_prob in enumerate(log_probs):
            path = paths[row] * given_parent(self._by_confidence[row], log_prob, self._factors[row] * by_depth)
            paths[row] = path
            if path > price:
                reach += path - price
        return reach > tables.min_reach[depth]

    def pays(self, log_probs: np.ndarray, chosen: np.ndarray, depth: int) -> bool:
        """Whether level `depth` + 1 is worth its time.

        Args:
            log_probs: of the candidates at `depth` [num_reqs, frontier, top_k], given their parents.
            chosen: int64 [num_reqs, kept]: which of a request's candidates are expanded next.
        """
        num_reqs, tables = len(log_probs), self._tables
        bins = confidence_bins(log_probs).reshape(num_reqs, -1)
        factors = np.array(self._factors) * tables.depth_factors[depth]
        by_confidence = np.array(tables.by_confidence)[np.array(self._sampled, dtype=np.int64)[:, None], bins]
        conditional = clipped(by_confidence * factors[:, None])
        path = (self._paths[:, :, None] * conditional.reshape(log_probs.shape)).reshape(num_reqs, -1)
        self._paths = np.take_along_axis(path, chosen, 1)
        return float(np.maximum(self._paths - tables.node_price[depth], 0.0).sum()) > tables.min_reach[depth]
