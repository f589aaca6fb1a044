"""Choice of tree nodes worth verifying, in numpy: the reference for kernels and policies."""

import numpy as np

from wingbeat.runtime.adaptive.acceptance import (
    DEPTH_BIT,
    KEPT_BIT,
    NO_CONFIDENCE,
    PARENT_BIT,
    REAL_BIT,
    DraftedTrees,
    along_rows,
)
from wingbeat.runtime.adaptive.policy import SpeculationPolicy


def drafted_trees(
    parents: np.ndarray, depths: np.ndarray, scores: np.ndarray, num_valid: np.ndarray, max_depth: int
) -> DraftedTrees:
    """Nodes of trees from cumulative log-probabilities. NaN counts as hopeless; nodes too deep do not count."""
    index = np.arange(parents.shape[1])
    real = (index < num_valid[:, None]) & (index > 0) & (depths <= max_depth)
    up = np.maximum(parents, 0)
    with np.errstate(invalid="ignore"):
        given = scores - along_rows(scores, up)
    given = np.fmin(np.fmax(np.where(real, given, NO_CONFIDENCE), NO_CONFIDENCE), 0.0)
    return DraftedTrees(up, np.minimum(depths, max_depth), given, real)


def pack_evidence(trees: DraftedTrees, kept: np.ndarray) -> np.ndarray:
    """The inverse of `unpack_evidence`."""
    bits = trees.log_probs.astype(np.float32).view(np.uint32).astype(np.int64)
    flags = (trees.real.astype(np.int64) << REAL_BIT) | (kept.astype(np.int64) << KEPT_BIT)
    return bits | (trees.parents << PARENT_BIT) | (trees.depths << DEPTH_BIT) | flags


def best_nodes(path: np.ndarray, real: np.ndarray, prices: np.ndarray | None) -> np.ndarray:
    """The likeliest nodes of all trees together, as many as are worth their prices; all of them without prices.

    Args:
        path: path probabilities [num_trees, num_nodes]; a child's is no higher than its parent's.
        real: bool [num_trees, num_nodes]: nodes that count.
        prices: as `SpeculationPolicy.prices`.
    """
    if prices is None:
        return real
    values = np.where(real, path, -1.0).ravel()
    order = (-values).argsort(kind="stable")[: int(real.sum())]
    best = int((np.append(0.0, values[order].cumsum()) - prices[: len(order) + 1]).argmax())
    kept = np.zeros(values.shape, dtype=bool)
    kept[order[:best]] = True
    return kept.reshape(path.shape)


def chosen_nodes(policy: SpeculationPolicy, path: np.ndarray, real: np.ndarray, num_reqs: int) -> np.ndarray:
    """Nodes that a policy has verified, of sequences with 100 tokens of context."""
    return best_nodes(path, real, policy.prices(num_reqs, real.size, 100.0))
