"""What a round costs: measured tables, interpolated, and scaled by what rounds really take.

Seconds throughout. `verify` is one forward pass of the verifier and what follows it; `draft` is the wait for trees.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_STEP = 0.05
"""Weight of one round in the running ratio of real to predicted time."""
_SCALE_RANGE = (0.25, 4.0)
_PULL = 0.2
"""Rounds' worth of evidence that a cost is as measured."""


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

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for the cache on disk."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "CostTables":
        """Read back what `as_dict` wrote.

        Raises:
            TypeError, ValueError: fields are missing, unknown or of the wrong shape.
        """
        fields = {key: tuple(value) for key, value in raw.items()}
        fields["verify_s"] = tuple(tuple(row) for row in fields.get("verify_s", ()))
        return cls(**fields)


class Scales:
    """How much a cost is beyond its measurement, by two factors: of what it is at least, and of what comes on top.

    They are told apart by rounds of different sizes; what these do not tell is shared out by a pull towards 1, so that
    a small batch corrects mostly the one and a large batch mostly the other. Recursive ridge regression.
    """

    def __init__(self) -> None:
        self.least = self.added = 1.0
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def observe(self, seconds: float, least_s: float, added_s: float) -> None:
        """Take in what a round took, beside what was measured for it."""
        x, predicted = added_s / least_s, self.least + self.added * added_s / least_s
        # One round of many times the usual length is an interruption, not a cost.
        y = min(max(seconds / least_s, predicted / 2), predicted * 2)
        keep = 1.0 - _STEP
        self._weight = keep * self._weight + 1.0
        self._x, self._xx = keep * self._x + x, keep * self._xx + x * x
        self._y, self._xy = keep * self._y + y, keep * self._xy + x * y
        a, b, d = self._weight + _PULL, self._x, self._xx + _PULL
        determinant = a * d - b * b
        self.least = _in_range((d * (self._y + _PULL) - b * (self._xy + _PULL)) / determinant)
        self.added = _in_range((a * (self._xy + _PULL) - b * (self._y + _PULL)) / determinant)


class RoundCosts:
    """Predicts rounds from tables, corrected by the rounds seen.

    A tree round runs beside the drafter, on warm or on contended cores, so plain and tree rounds have scales of their
    own.
    """

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self._plain_scale: float | None = None
        self.tree_scales, self.draft_scales = Scales(), Scales()
        self.packing_s = 0.0
        """Added to a tree round by trees of unequal sizes, which have to be packed."""
        self.plain_host_s = self.tree_host_s = 0.0
        self._beyond_s: dict[bool, float] = {}
        """What packed and padded tree rounds took beyond their prediction without packing."""
        self._by_batch: dict[int, _BatchCosts] = {}

    @property
    def plain_scale(self) -> float:
        """What a plain round takes by its measurement; until one was seen, what tree rounds say of the machine."""
        return self.tree_scales.least if self._plain_scale is None else self._plain_scale

    def verify_s(self, num_reqs: int, num_extra: np.ndarray, mean_context: float) -> np.ndarray:
        """Time of a forward pass over `num_reqs` roots and `num_extra` [n] drafted nodes in all: float64 [n].

        What stands at 0 is a plain round.
        """
        batch, scales = self._batch(num_reqs), self.tree_scales
        least = batch.plain_s + batch.context_s * mean_context
        trees = scales.least * least + scales.added * (batch.verify(num_extra) - batch.plain_s)
        return np.where(np.asarray(num_extra) > 0, trees, self.plain_scale * least)

    def verify_up_to_s(self, num_reqs: int, most_extra: int, mean_context: float) -> np.ndarray:
        """`verify_s` of 0, 1, .. `most_extra` drafted nodes: float64 [most_extra + 1]."""
        batch, scales = self._batch(num_reqs), self.tree_scales
        least = batch.plain_s + batch.context_s * mean_context
        seconds = scales.added * batch.dense(most_extra) + (scales.least * least - scales.added * batch.plain_s)
        seconds[0] = self.plain_scale * least
        return seconds

    def draft_s(self, num_reqs: int, levels: np.ndarray) -> np.ndarray:
        """Wait for trees of `levels` [n] levels for `num_reqs` sequences: float64 [n]."""
        batch, scales = self._batch(num_reqs), self.draft_scales
        return scales.least * batch.draft_base_s + scales.added * batch.draft_level_s * np.asarray(levels)

    def level_s(self, num_reqs: int) -> float:
        """Time of one more level."""
        return self.draft_scales.added * self._batch(num_reqs).draft_level_s

    def observe_verify(
        self, seconds: float, num_reqs: int, num_extra: int, mean_context: float, packed: bool = False
    ) -> None:
        """Correct the prediction by a round that really ran.

        Args:
            num_extra: rows beside the roots, padding included where trees were not packed.
        """
        batch, scales = self._batch(num_reqs), self.tree_scales
        least = batch.plain_s + batch.context_s * mean_context
        if not num_extra:
            self._plain_scale = _corrected(self.plain_scale, seconds / least)
            return
        added = float(batch.dense(num_extra)[-1]) - batch.plain_s
        beyond = min(seconds - scales.least * least - scales.added * added, least)
        before = self._beyond_s.get(packed, beyond)
        self._beyond_s[packed] = before + _STEP * (beyond - before)
        if len(self._beyond_s) == 2:
            self.packing_s = max(self._beyond_s[True] - self._beyond_s[False], 0.0)
        scales.observe(seconds - (self.packing_s if packed else 0.0), least, added)

    def observe_draft(self, seconds: float, num_reqs: int, levels: float) -> None:
        """Correct the prediction by a wait that really was."""
        batch = self._batch(num_reqs)
        self.draft_scales.observe(seconds, batch.draft_base_s, batch.draft_level_s * levels)

    def observe_host(self, seconds: float, with_tree: bool) -> None:
        """Note what a round spent outside of models."""
        if with_tree:
            self.tree_host_s += _STEP * (seconds - self.tree_host_s)
        else:
            self.plain_host_s += _STEP * (seconds - self.plain_host_s)

    def _batch(self, num_reqs: int) -> "_BatchCosts":
        if num_reqs not in self._by_batch:
            self._by_batch[num_reqs] = _BatchCosts(self.tables, num_reqs)
        return self._by_batch[num_reqs]


class _BatchCosts:
    """The tables at one batch size, before any scale."""

    def __init__(self, tables: CostTables, num_reqs: int) -> None:
        low, high, share = _bracket(tables.batch_sizes, num_reqs)

        def between(column: tuple) -> np.ndarray:
            return (1 - share) * np.asarray(column[low]) + share * np.asarray(column[high])

        self._num_reqs = num_reqs
        self._columns = np.asarray(tables.extra_nodes, dtype=np.float64)
        self._measured = between(tables.verify_s)
        self.plain_s = float(self._measured[0])
        self.context_s = float(between(tables.context_s))
        self.draft_base_s = float(between(tables.draft_base_s))
        self.draft_level_s = float(between(tables.draft_level_s))
        self._dense = np.zeros(0)

    def verify(self, num_extra: np.ndarray) -> np.ndarray:
        """Seconds by drafted nodes of the whole batch."""
        return _interpolate(np.asarray(num_extra) / max(self._num_reqs, 1), self._columns, self._measured)

    def dense(self, most_extra: int) -> np.ndarray:
        """`verify` of 0, 1, .. most_extra; computed once, as far as it is needed."""
        if len(self._dense) <= most_extra:
            self._dense = self.verify(np.arange(max(most_extra + 1, 2 * len(self._dense))))
        return self._dense[: most_extra + 1]


def _corrected(scale: float, ratio: float) -> float:
    """The running ratio of real to predicted time, one round further."""
    # One round of many times the usual length is an interruption, not a cost.
    ratio = min(max(float(ratio), scale / 2), scale * 2)
    return _in_range(scale + _STEP * (ratio - scale))


def _in_range(scale: float) -> float:
    return min(max(scale, _SCALE_RANGE[0]), _SCALE_RANGE[1])


def _interpolate(at: np.ndarray, points: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Piecewise linear through (points, values); beyond the last point by the last slope."""
    inside = np.interp(at, points, values)
    if len(points) < 2:
        return inside
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
    return inside + np.maximum(at - points[-1], 0.0) * max(slope, 0.0)


def _bracket(points: tuple[int, ...], at: int) -> tuple[int, int, float]:
    """Neighbouring indices around a value, and how far it lies towards the second; beyond the ends the end itself."""
    high = int(np.searchsorted(points, at))
    if high >= len(points):
        return len(points) - 1, len(points) - 1, 0.0
    if high == 0 or points[high] == at:
        return high, high, 0.0
    low = high - 1
    return low, high, (at - points[low]) / (points[high] - points[low])
