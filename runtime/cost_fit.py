"""Factors by which the parts of a predicted cost are off, fitted online to what was really taken.

In plain numbers: a handful of them, where each array operation would cost as much as the whole.
"""

from collections.abc import Sequence

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
        self._expected = list(expected)
        num = len(self._expected) + 1
        self._pull = [_PULL_COMMON] + [_PULL_OWN] * (num - 1)
        self._prior = [1.0] + [0.0] * (num - 1)
        self._pairs = [(row, column) for row in range(num) for column in range(row + 1)]
        self._xx = [0.0] * len(self._pairs)
        self._xy = [0.0] * num
        self._factors = self._expected
        self._new: list[tuple[float, Sequence[float]]] = []
        self.seen = False
        """Whether anything was observed."""

    def observe(self, seconds: float, parts: Sequence[float]) -> None:
        """Note what was taken where `parts` were predicted, in seconds, of which not all are 0."""
        self.seen = True
        self._new.append((seconds, parts))
        if len(self._new) >= _FOLD_AFTER:
            self._fold()

    @property
    def factors(self) -> list[float]:
        """By part."""
        if self._new:
            self._fold()
        return self._factors

    def _fold(self) -> None:
        """Take in what is new; asked for less often than noted."""
        keep = 1.0 - _FORGET
        for seconds, parts in self._new:
            size = _dot(parts, self._expected)
            shares = [part / size for part in parts]  # errors count relative to the round's size
            predicted = _dot(shares, self._factors)
            # One round of many times the usual length is an interruption, not a cost.
            y = min(max(seconds / size, predicted / 2), predicted * 2)
            x = [1.0, *shares]
            self._xx = [keep * old + x[i] * x[j] for old, (i, j) in zip(self._xx, self._pairs, strict=True)]
            self._xy = [keep * old + a * y for old, a in zip(self._xy, x, strict=True)]
        self._new.clear()
        matrix = [[0.0] * len(self._pull) for _ in self._pull]
        for (i, j), value in zip(self._pairs, self._xx, strict=True):
            matrix[i][j] = matrix[j][i] = value + self._pull[i] * (i == j)
        right = [xy + pull * prior for xy, pull, prior in zip(self._xy, self._pull, self._prior, strict=True)]
        common, *own = _solve(matrix, right)
        low, high = _RANGE
        self._factors = [
            min(max(expected * common + part, expected * low), high)
            for expected, part in zip(self._expected, own, strict=True)
        ]


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Of a positive definite system, which needs no pivoting; both arguments are used up."""
    num = len(right)
    for column in range(num):
        pivot = matrix[column]
        for row in range(column + 1, num):
            factor = matrix[row][column] / pivot[column]
            if factor:
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], pivot, strict=True)]
                right[row] -= factor * right[column]
    solution = [0.0] * num
    for row in reversed(range(num)):
        rest = _dot(matrix[row][row + 1 :], solution[row + 1 :])
        solution[row] = (right[row] - rest) / matrix[row][row]
    return solution
