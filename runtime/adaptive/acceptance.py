"""Probability that a drafted node is accepted, learned online from the drafter's confidence.

A drafter's confidence is badly calibrated: an EAGLE head trained on sampled text reports 0.3 where a greedy target
agrees nine times out of ten. Confidences are therefore sorted into bins, and acceptance is counted for each bin:

    P(node | parent accepted) = table[kind of tree and request; bin of the confidence]
    P(node) = product of P(node | parent accepted) along the node's path
"""

from math import prod
from typing import NamedTuple

import numpy as np

from wingbeat.runtime.config import NUM_BINS
from wingbeat.runtime.scheduling.sequence import Sequence

_LOGIT_RANGE = 6.0
OF_TEXT = 2
"""First row of the acceptance table that is for trees built from earlier text, see `Acceptance`."""
PRIOR_TRIALS = 4.0
FORGET_ROUNDS = 2048
"""Number of recorded rounds after which the weight of evidence has decayed to 1/e."""
NO_CONFIDENCE = -50.0
"""Log-probability that replaces impossible scores of a drafter."""

PARENT_BIT, DEPTH_BIT, REAL_BIT, KEPT_BIT = 32, 47, 61, 62
"""Bit positions in the evidence of a node, an int64. The float32 log-probability is in the low word, followed by the
index of the parent, the depth, and the flags real and kept."""
_PARENT_MASK, _DEPTH_MASK = (1 << (DEPTH_BIT - PARENT_BIT)) - 1, (1 << (REAL_BIT - DEPTH_BIT)) - 1


def draft_kind(seq: Sequence) -> int:
    """Row of `Acceptance.table` for the nodes of a sequence's next tree."""
    return int(seq.request.params.temperature > 0) + OF_TEXT * (seq.draft.text_tree is not None)


def bin_edges() -> np.ndarray:
    """Returns the log-probabilities at the bin boundaries, float64 [NUM_BINS - 1], ascending.

    Steps of log-odds are equal.
    """
    log_odds = np.arange(1, NUM_BINS) * (2 * _LOGIT_RANGE / NUM_BINS) - _LOGIT_RANGE
    return -np.log1p(np.exp(-log_odds))


EDGES = bin_edges()


class DraftedTrees(NamedTuple):
    """Trees before pruning, on the host: arrays [num_reqs, num_nodes], in which column 0 holds the roots."""

    parents: np.ndarray
    """int64: index of each node's parent; 0 for the root."""
    depths: np.ndarray
    """int64"""
    log_probs: np.ndarray
    """float: log-probability of each node if its parent is accepted."""
    real: np.ndarray
    """bool: whether a node is a valid drafted node; False for roots and padding."""

    def rows(self, rows: np.ndarray) -> "DraftedTrees":
        """Returns the trees of the given rows."""
        return DraftedTrees(*(field[rows] for field in self))


def unpack_evidence(words: np.ndarray) -> tuple[DraftedTrees, np.ndarray]:
    """Decodes evidence words; returns the trees, and which nodes pruning kept, bool [num_reqs, num_nodes]."""
    trees = DraftedTrees(
        parents=(words >> PARENT_BIT) & _PARENT_MASK,
        depths=(words >> DEPTH_BIT) & _DEPTH_MASK,
        log_probs=(words & 0xFFFFFFFF).astype(np.uint32).view(np.float32).astype(np.float64),
        real=(words >> REAL_BIT) & 1 == 1,
    )
    return trees, (words >> KEPT_BIT) & 1 == 1


def along_rows(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Returns `values[row, index[row]]` for each row; for small arrays, faster than numpy.take_along_axis."""
    return values[np.arange(len(index))[:, None], index]


def given_parent(table: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Returns P(node accepted | parent accepted), in the shape of `log_probs` [num_reqs, ...].

    Args:
        table: [num_reqs, NUM_BINS]: row of `Acceptance.table` for each request.
    """
    bins = EDGES.searchsorted(log_probs)
    return along_rows(table, bins.reshape(len(bins), prod(bins.shape[1:]))).reshape(log_probs.shape)


def path_probabilities(table: np.ndarray, trees: DraftedTrees) -> np.ndarray:
    """Returns P(node and all its ancestors are accepted), [num_reqs, num_nodes]; 1 for roots, 0 for nodes not `real`.

    Args:
        table: see `given_parent`.
    """
    one_step = np.where(trees.real, given_parent(table, trees.log_probs), 0.0)
    one_step[:, 0] = 1.0
    path, deepest = one_step, int(np.where(trees.real, trees.depths, 0).max(initial=0))
    if deepest == path.shape[1] - 1:  # a tree whose depth is its number of drafted nodes is a chain
        return np.cumprod(path, axis=1)
    for _ in range(deepest - 1):  # each iteration completes the next level; the root's column stays 1
        path = one_step * along_rows(path, trees.parents)
    return path


def prior_table() -> np.ndarray:
    """Returns the assumed acceptance before there is evidence, in the layout of `Acceptance.table`.

    A greedy target agrees with EAGLE heads far more often than the heads' confidence suggests. Confidences of trees
    built from earlier text are estimated from counts, so these confidences are used unchanged.
    """
    centres = (np.arange(NUM_BINS) + 0.5) * (2 * _LOGIT_RANGE / NUM_BINS) - _LOGIT_RANGE
    log_odds = np.stack([1.2 * centres + 2.4, 0.7 * centres + 0.7, centres, centres])
    return 1.0 / (1.0 + np.exp(-log_odds))


class Acceptance:
    """Acceptance counts by bin of confidence; its arrays are updated in place."""

    def __init__(self) -> None:
        self.successes = PRIOR_TRIALS * prior_table()
        self.trials = np.full_like(self.successes, PRIOR_TRIALS)
        self.table = self.successes / self.trials
        """float64 [4, NUM_BINS]: acceptance by bin. Rows 0 and 1 are greedy and sampled requests with the drafter's
        trees; rows 2 and 3 are greedy and sampled requests with trees built from earlier text."""
        self.expected_accepted = 0.0
        """Sum of the predicted probabilities of verified nodes whose parent was accepted; about equal to `num_accepted`
        if predictions are right."""
        self.num_accepted = 0

    def record(self, trees: DraftedTrees, kinds: np.ndarray, tried: np.ndarray, accepted: np.ndarray) -> None:
        """Adds the outcome of one verified round.

        Args:
            kinds: int64 [num_reqs]: row of `table` for each request.
            tried: bool [num_reqs, num_nodes]: verified nodes whose parent was accepted.
            accepted: bool [num_reqs, num_nodes]: accepted nodes; a subset of `tried`.
        """
        cells = (EDGES.searchsorted(trees.log_probs) + NUM_BINS * kinds[:, None]).ravel()
        self.expected_accepted += float(given_parent(self.table[kinds], trees.log_probs)[tried].sum())
        self.num_accepted += int(accepted.sum())
        # Counts decay, including the prior, but not below PRIOR_TRIALS, so a bin without evidence keeps its prior.
        old = self.trials > PRIOR_TRIALS
        self.trials[old] *= 1.0 - 1.0 / FORGET_ROUNDS
        self.successes[old] *= 1.0 - 1.0 / FORGET_ROUNDS
        for counts, part in ((self.trials, tried), (self.successes, accepted)):
            counts.reshape(-1)[:] += np.bincount(cells, part.ravel().astype(np.float64), counts.size)
        np.divide(self.successes, self.trials, out=self.table)
