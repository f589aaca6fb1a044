"""Factors by which the parts of a predicted cost are off, fitted online to what was really taken."""

from collections.abc import Sequence

import numpy as np

_FORGET = 0.05
"""Evidence that fades per observation."""
_PULL_COMMON, _PULL_OWN = 0.1, 0.1
"""Observations' worth of belief that a prediction is right as a whole, and that its parts are off alike."""
_RANGE = (0.1, 10.0)
_FOLD_AFTER = 64


class CostFit:
    """Recursive ridge regression of real seconds on the predicted seconds of their parts.

    The parts share one factor first, since a machine that runs at half its speed does so for all of them; they differ
    from it as far as observations of different make-up show it.

    Args:
        expected: factor of each part before any observation, relative to the common one: 1 for what was measured, 0
            for what is not known to take any time.
    """

    def __init__(self, expected: Sequence[float]) -> None:
        self._expected = np.array(expected, dtype=np.float64)
        num = len(self._expected) + 1
        self._pull = np.array([_PULL_COMMON] + [_PULL_OWN] * (num - 1))
        self._prior = np.array([1.0] + [0.0] * (num - 1))
        self._xx = np.zeros((num, num))
        self._xy = np.zeros(num)
        self._factors = self._expected
        self._new: list[tuple[float, ...]] = []
        self.seen = False
        """Whether anything was observed."""

    def observe(self, seconds: float, parts: Sequence[float]) -> None:
        """Note what was taken where `parts` were predicted, in seconds, of which not all are 0."""
        self.seen = True
        self._new.append((seconds, *parts))
        if len(self._new) >= _FOLD_AFTER:
            self._fold()

    @property
    def factors(self) -> list[float]:
        """By part."""
        if self._new:
            self._fold()
        return self._factors.tolist()

    def _fold(self) -> None:
        """Take in what is new; asked for less often than noted."""
        seconds, parts = np.split(np.array(self._new), [1], axis=1)
        self._new.clear()
        size = (parts @ self._expected)[:, None]
        x = np.hstack([np.ones_like(size), parts / size])  # errors count relative to the round's size
        predicted = x[:, 1:] @ self._factors
        # One round of many times the usual length is an interruption, not a cost.
        y = np.clip((seconds / size)[:, 0], predicted / 2, predicted * 2)
        kept = (1.0 - _FORGET) ** np.arange(len(x))
        weighted = x * kept[::-1, None]
        fade = kept[-1] * (1.0 - _FORGET)
        self._xx = fade * self._xx + weighted.T @ x
        self._xy = fade * self._xy + weighted.T @ y
        common, *own = np.linalg.solve(self._xx + np.diag(self._pull), self._xy + self._pull * self._prior)
        low, high = _RANGE
        self._factors = np.clip(self._expected * common + own, self._expected * low, high)
