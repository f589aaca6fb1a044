"""What a round takes: measured tables, interpolated, and scaled by what rounds really take. Seconds throughout."""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

SecondsT = TypeVar("SecondsT", float, np.ndarray)

_SMOOTHING = 0.05
"""Least weight of one round in a scale."""
_LEAST, _MOST = 0.1, 10.0
_STALE_AFTER, _STALE_WEIGHT = 32, 0.25
"""Plain rounds after which a draft says more than all before: the way may be another one by now."""


@dataclass(frozen=True)
class CostTables:
    """Measured medians, over batch sizes in ascending order.

    Raises:
        ValueError: a table does not have the shape of its axes.
    """

    batch_sizes: tuple[int, ...]
    extra_nodes: tuple[int, ...]
    """Drafted nodes per sequence, ascending, 0 first."""
    verify_s: tuple[tuple[float, ...], ...]
    """[batch size][extra nodes], at a short context."""
    context_s: tuple[float, ...]
    """[batch size]: added by each token of context of each sequence."""
    draft_base_s: tuple[float, ...]
    """[batch size]: of a draft, beside its levels."""
    draft_level_s: tuple[float, ...]
    """[batch size]: of each level."""

    def __post_init__(self) -> None:
        rows = (self.verify_s, self.context_s, self.draft_base_s, self.draft_level_s)
        if any(len(row) != len(self.batch_sizes) for row in rows):
            raise ValueError("cost tables need one row per batch size")
        if any(len(row) != len(self.extra_nodes) for row in self.verify_s):
            raise ValueError("verify_s needs one column per entry of extra_nodes")


class Scale:
    """Real seconds over a table's, by a running mean."""

    def __init__(self) -> None:
        self.value = 1.0
        self.num_seen = 0

    def observe(self, seconds: float, of_s: float, beside_s: float = 0.0) -> None:
        """Note what was really taken.

        Args:
            of_s: by the tables, of what this scales.
            beside_s: likewise, of what shared the time.
        """
        self.num_seen += 1
        weight = max(1.0 / self.num_seen, _SMOOTHING) * of_s / (of_s + beside_s)
        now = seconds / (of_s + beside_s)
        if self.num_seen > 1:  # one round of many times the usual length is an interruption, not a cost
            now = min(max(now, 0.5 * self.value), 2.0 * self.value)
        self.value = min(max(self.value + weight * (now - self.value), _LEAST), _MOST)


class DraftWaits:
    """Real waits for trees: a multiple of the table's, and the way to the drafter, which no level makes longer.

    What a wait was mispredicted by goes to both, the more to the scale the longer the trees took beside their mean
    (normalised least mean squares): so waits for trees of several depths tell the two apart.
    """

    def __init__(self) -> None:
        self.scale, self.way_s = 1.0, 0.0
        self.num_seen = 0
        self._mean_s = 0.0
        """By the table."""

    def predict(self, trees_s: SecondsT) -> SecondsT:
        """Of trees that take so long by the table."""
        return self.scale * trees_s + self.way_s

    def observe(self, seconds: float, trees_s: float, beside_s: float, least_weight: float) -> None:
        """Note what was really waited; arguments as those of `Scale.observe`."""
        self.num_seen += 1
        weight = max(1.0 / self.num_seen, least_weight) * trees_s / (trees_s + beside_s)
        expected = self.predict(trees_s + beside_s)
        least, most = (_LEAST, _MOST) if self.num_seen == 1 else (0.5, 2.0)
        seconds = min(max(seconds, least * expected), most * expected)
        all_s, error = trees_s + beside_s, weight * (seconds - expected)
        self._mean_s += max(1.0 / self.num_seen, least_weight) * (all_s - self._mean_s)
        to_scale = error * all_s / (all_s**2 + self._mean_s**2)
        scale = min(max(self.scale + to_scale, _LEAST), _MOST)
        self.way_s = max(self.way_s + error - (scale - self.scale) * all_s, 0.0)
        self.scale = scale


class RoundCosts:
    """Predicts rounds without prompts: a prompt takes its time however the tokens behind it are decoded.

    A tree round runs beside the drafter, on warm or on contended cores, so plain rounds, verification and drafts are
    corrected each by itself.
    """

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self._plain, self._verify, self._draft = Scale(), Scale(), DraftWaits()
        self._num_plain = 0
        """Rounds since a draft was last seen."""
        self._by_batch: dict[int, _BatchCosts] = {}
        """Asked for in every round."""
        most, level = tables.batch_sizes[-1], tables.draft_level_s
        # What a token of a prompt takes: about what a row of the largest batch does.
        rows = max((tables.extra_nodes[-1] - tables.extra_nodes[0]) * most, 1)
        self._verify_row_s = max(tables.verify_s[-1][-1] - tables.verify_s[-1][0], 0.0) / rows
        self._draft_row_s = max(level[-1] - level[0], 0.0) / max(most - tables.batch_sizes[0], 1)

    def verify_s(self, num_reqs: int, num_extra: np.ndarray, mean_context: float) -> np.ndarray:
        """Time of rounds over `num_reqs` roots and `num_extra` [n] drafted nodes in all, drafts left out: float64 [n].

        What stands at 0 is a plain round.
        """
        plain = self._plain if self._plain.num_seen else self._verify
        scale = np.where(np.asarray(num_extra) > 0, self._verify.value, plain.value)
        return scale * self._pass_s(num_reqs, num_extra, mean_context)

    def draft_s(self, num_reqs: int, levels: np.ndarray) -> np.ndarray:
        """Wait for trees of `levels` [n] levels for `num_reqs` sequences: float64 [n]."""
        return self._draft.predict(self._trees_s(num_reqs, levels))

    def observe_verify(
        self, seconds: float, num_reqs: int, num_extra: int, mean_context: float, num_chunk_tokens: int = 0
    ) -> None:
        """Correct the prediction by a round that really ran, without its wait for trees.

        Args:
            num_extra: drafted nodes; 0 in a plain round.
            num_chunk_tokens: rows of prompts.
        """
        scale = self._verify if num_extra else self._plain
        self._num_plain += not num_extra
        pass_s = float(self._pass_s(num_reqs, np.array(num_extra), mean_context))
        scale.observe(seconds, pass_s, self._verify_row_s * num_chunk_tokens)

    def observe_draft(self, seconds: float, num_reqs: int, levels: int, num_chunk_tokens: int = 0) -> None:
        """Correct the prediction by a wait that really was.

        Args:
            num_chunk_tokens: context that the drafter took in first.
        """
        trees_s = float(self._trees_s(num_reqs, np.array(levels)))
        weight = _STALE_WEIGHT if self._num_plain > _STALE_AFTER else _SMOOTHING
        self._num_plain = 0
        self._draft.observe(seconds, trees_s, self._draft_row_s * num_chunk_tokens, weight)

    def _pass_s(self, num_reqs: int, num_extra: np.ndarray, mean_context: float) -> np.ndarray:
        batch, extra = self._of_batch(num_reqs), np.asarray(num_extra)
        nodes_s = np.interp(extra, batch.nodes, batch.verify_s)
        return nodes_s + batch.beyond_s * np.maximum(extra - batch.nodes[-1], 0.0) + batch.context_s * mean_context

    def _trees_s(self, num_reqs: int, levels: np.ndarray) -> np.ndarray:
        batch = self._of_batch(num_reqs)
        return batch.draft_base_s + batch.draft_level_s * np.asarray(levels)

    def _of_batch(self, num_reqs: int) -> "_BatchCosts":
        if num_reqs not in self._by_batch:
            self._by_batch[num_reqs] = self._interpolated(num_reqs)
        return self._by_batch[num_reqs]

    def _interpolated(self, num_reqs: int) -> "_BatchCosts":
        tables = self.tables

        def at(by_batch: tuple[float, ...]) -> float:
            return float(np.interp(num_reqs, tables.batch_sizes, by_batch))

        verify_s = np.array([at(column) for column in zip(*tables.verify_s, strict=True)])
        nodes = np.array(tables.extra_nodes, dtype=np.float64) * max(num_reqs, 1)
        slope = (verify_s[-1] - verify_s[-2]) / (nodes[-1] - nodes[-2]) if len(nodes) > 1 else 0.0
        return _BatchCosts(
            nodes=nodes,
            verify_s=verify_s,
            beyond_s=max(slope, 0.0),
            context_s=at(tables.context_s),
            draft_base_s=at(tables.draft_base_s),
            draft_level_s=at(tables.draft_level_s),
        )


class _BatchCosts(NamedTuple):
    """The tables at one batch size."""

    nodes: np.ndarray
    """float64 [n] ascending: drafted nodes of all sequences together."""
    verify_s: np.ndarray
    """float64 [n]: of passes with so many."""
    beyond_s: float
    """Added by each node above the last of `nodes`."""
    context_s: float
    """Added by each token of context of each sequence."""
    draft_base_s: float
    draft_level_s: float
