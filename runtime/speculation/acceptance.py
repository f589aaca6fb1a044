"""How likely a drafted node is accepted: learned online from the drafter's own confidence, by depth and by request.

A drafter's confidence is a poor probability: an EAGLE head trained on sampled text says 0.3 where a greedy target
agrees nine times out of ten. So confidences are only ranked by it, and each rank's acceptance is counted. Counting is
the host's, in numpy; a device may look the tables up (`conditional_on_device`).
"""

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.protocol.messages import NUM_BINS

_LOGIT_RANGE = 6.0
_PRIOR_TRIALS = 8.0
_FORGET = 1.0 - 1.0 / 2048
"""Per recorded round: evidence fades over some thousand rounds."""
_REQUEST_PRIOR = 6.0
_REQUEST_FORGET = 0.95
_FLOOR, _CEILING = 0.005, 0.995


def bin_edges() -> np.ndarray:
    """Log-probabilities between the bins: equal steps of log-odds, float64 [NUM_BINS - 1] ascending."""
    log_odds = np.arange(1, NUM_BINS) * (2 * _LOGIT_RANGE / NUM_BINS) - _LOGIT_RANGE
    return -np.log1p(np.exp(-log_odds))


_EDGES = bin_edges()
_EDGE_LIST: list[float] = _EDGES.tolist()


def confidence_bins(log_probs: np.ndarray) -> np.ndarray:
    """Bin of each conditional log-probability, by its log-odds: int64, 0..NUM_BINS - 1."""
    return _EDGES.searchsorted(log_probs)


def given_parent(by_confidence: list[float], log_prob: float, factor: float) -> float:
    """P(node | parent accepted) of one node, in plain numbers: arrays of a handful would cost several times as much.

    Args:
        by_confidence: the request's row of `AcceptanceTracker.table`.
        log_prob: conditional log-probability the drafter gave.
        factor: of depth and request, multiplied.
    """
    given = by_confidence[bisect_left(_EDGE_LIST, log_prob)] * factor
    return _FLOOR if given < _FLOOR else _CEILING if given > _CEILING else given


def clipped(conditional: np.ndarray) -> np.ndarray:
    """As far as a probability of acceptance is ever believed to go."""
    return np.minimum(np.maximum(conditional, _FLOOR), _CEILING)


def conditional_on_device(log_probs: Tensor, edges: Tensor, tables: Tensor, factors: Tensor) -> Tensor:
    """`AcceptanceTracker.conditional` in float32 on a device: [num_reqs, num_nodes].

    Args:
        log_probs: float32 [num_reqs, num_nodes], as there.
        edges: float32 [NUM_BINS - 1]: `bin_edges`.
        tables: float32 [num_reqs, NUM_BINS]: each request's row of `AcceptanceTracker.table`.
        factors: float32 [num_reqs, num_nodes]: of depth and request, multiplied.
    """
    bins = torch.bucketize(log_probs, edges)
    return (tables.gather(1, bins) * factors).clamp(_FLOOR, _CEILING)


def path_probabilities(conditional: np.ndarray, parents: np.ndarray, depth: int) -> np.ndarray:
    """P(node and all its ancestors are accepted) [num_reqs, num_nodes] from P(node | parent); 1 for the root.

    Args:
        conditional: float64 [num_reqs, num_nodes]; column 0 is ignored.
        parents: int64 [num_reqs, num_nodes].
        depth: of the deepest node.
    """
    up = np.maximum(parents, 0)
    one_step = conditional.copy()
    one_step[:, 0] = 1.0
    if depth == parents.shape[1] - 1:  # a tree as deep as it has nodes is a chain
        return np.cumprod(one_step, axis=1)
    path = one_step
    # Each pass makes one more level right; the root's column stays 1.
    for _ in range(depth - 1):
        path = one_step * np.take_along_axis(path, up, axis=1)
    return path


class AcceptanceTracker:
    """Calibrated acceptance of drafted nodes.

    P(node | parent accepted) = table[greedy or sampled, bin of the confidence] x factor of the depth x factor of the
    request; factors are accepted / expected with a prior of 1.

    Args:
        num_slots: running sequences.
        max_depth: of the deepest node.
    """

    def __init__(self, num_slots: int, max_depth: int) -> None:
        centres = (np.arange(NUM_BINS) + 0.5) * (2 * _LOGIT_RANGE / NUM_BINS) - _LOGIT_RANGE
        # Before any evidence: what a greedy target agrees with far more often than heads believe, as EAGLE heads go.
        greedy = 1.0 / (1.0 + np.exp(-(1.2 * centres + 2.4)))
        sampled = 1.0 / (1.0 + np.exp(-(0.7 * centres + 0.7)))
        self._trials = np.full((2, NUM_BINS), _PRIOR_TRIALS)
        self._successes = _PRIOR_TRIALS * np.stack([greedy, sampled])
        self._depth_expected = np.full(max_depth + 1, _PRIOR_TRIALS)
        self._depth_accepted = self._depth_expected.copy()
        self._request_expected = np.full(num_slots, _REQUEST_PRIOR)
        self._request_accepted = self._request_expected.copy()
        self.version = 0
        """Grows with every change of what follows."""
        self.table = self.depth_factors = self.request_factors = np.zeros(0)
        self._refresh()
        self.expected_accepted = 0.0
        """Sum of the probabilities given to verified nodes whose parent was accepted; compare `num_accepted`."""
        self.num_accepted = 0

    def _refresh(self) -> None:
        """What is read many times for each time it changes."""
        self.version += 1
        self.table = self._successes / self._trials
        """float64 [2, NUM_BINS]: acceptance by bin, of greedy and of sampled requests."""
        self.depth_factors = self._depth_accepted / self._depth_expected
        """float64 [max_depth + 1]"""
        self.request_factors = self._request_accepted / self._request_expected
        """float64 [num_slots]"""
        self._table_lists: list[list[float]] = self.table.tolist()
        self._depth_list: list[float] = self.depth_factors.tolist()

    def admit(self, slot: int) -> None:
        """A slot got another request: back to the prior."""
        self._request_expected[slot] = self._request_accepted[slot] = _REQUEST_PRIOR
        self.request_factors[slot] = 1.0
        self.version += 1

    def conditional(
        self, log_probs: np.ndarray, depths: np.ndarray, sampled: np.ndarray, slots: np.ndarray
    ) -> np.ndarray:
        """P(node accepted | parent accepted), float64 [num_reqs, num_nodes].

        Args:
            log_probs: conditional log-probability the drafter gave [num_reqs, num_nodes].
            depths: int64 [num_reqs, num_nodes].
            sampled: bool [num_reqs]: the request's temperature is above 0.
            slots: int64 [num_reqs].
        """
        by_confidence = self.table[sampled.astype(np.int64)[:, None], confidence_bins(log_probs)]
        factors = self.depth_factors[depths] * self.request_factors[slots][:, None]
        return clipped(by_confidence * factors)

    def chain_path(self, scores: list[float], sampled: bool, slot: int) -> list[float]:
        """Path probabilities of one chain, the root's 1 first: `conditional` and `path_probabilities` in plain numbers.

        Args:
            scores: cumulative log-probabilities, the root's first.
        """
        by_confidence, factor = self._table_lists[sampled], float(self.request_factors[slot])
        here, before = 1.0, scores[0]
        path = [here]
        for score, by_depth in zip(scores[1:], self._depth_list[1:], strict=False):
            here *= given_parent(by_confidence, score - before, factor * by_depth)
            path.append(here)
            before = score
        return path

    def record(
        self,
        log_probs: np.ndarray,
        depths: np.ndarray,
        sampled: np.ndarray,
        slots: np.ndarray,
        tried: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Learn from one verified round.

        Args:
            log_probs, depths, sampled, slots: as in `conditional`.
            tried: bool [num_reqs, num_nodes]: verified nodes whose parent was accepted.
            accepted: bool [num_reqs, num_nodes]: those accepted themselves.
        """
        kind = sampled.astype(np.int64)[:, None]
        bins = confidence_bins(log_probs)
        by_confidence = np.where(tried, self.table[kind, bins], 0.0)
        by_depth = by_confidence * self.depth_factors[depths]
        by_request = by_confidence * self.request_factors[slots][:, None]
        cells = bins + NUM_BINS * kind
        self.num_accepted += int(accepted.sum())
        self.expected_accepted += float(np.minimum(by_depth * self.request_factors[slots][:, None], _CEILING).sum())
        self._fade()
        weights = tried.astype(np.float64).ravel()
        hits = accepted.astype(np.float64).ravel()
        flat = cells.ravel()
        self._trials += np.bincount(flat, weights, 2 * NUM_BINS).reshape(2, NUM_BINS)
        self._successes += np.bincount(flat, hits, 2 * NUM_BINS).reshape(2, NUM_BINS)
        levels = depths.ravel()
        width = len(self._depth_expected)
        self._depth_expected += np.bincount(levels, by_request.ravel(), width)
        self._depth_accepted += np.bincount(levels, hits, width)
        self._fade_requests(slots)
        # Each factor is held against what the others say, so that none corrects for another's correction.
        self._request_expected[slots] += by_depth.sum(axis=1)
        self._request_accepted[slots] += accepted.sum(axis=1)
        self._refresh()

    def _fade(self) -> None:
        # Priors fade with the evidence and are topped up again, so that a bin never seen keeps its prior.
        for total, part in ((self._trials, self._successes), (self._depth_expected, self._depth_accepted)):
            grown = total > _PRIOR_TRIALS
            total[grown] *= _FORGET
            part[grown] *= _FORGET

    def _fade_requests(self, slots: np.ndarray) -> None:
        keep = _REQUEST_FORGET
        for part in (self._request_expected, self._request_accepted):
            part[slots] = keep * part[slots] + (1.0 - keep) * _REQUEST_PRIOR
