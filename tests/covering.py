"""Rows of a table that cover all pairs of its values, or each value, instead of all combinations."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]


def pairwise(axes: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows of one value of each axis, in which any two values that may meet do meet.

    The row that brings the most new pairs comes first, so that the first few rows are worth the most.
    """
    rows = [row for values in product(*axes.values()) if allowed(row := dict(zip(axes, values, strict=True)))]
    return [rows[index] for index in meeting([row.items() for row in rows])]


def meeting(rows: Sequence[Collection[Hashable]]) -> list[int]:
    """Indices of rows in which any two values meet that meet in some row; the one with the most new pairs first."""
    bits: dict[Hashable, int] = {}
    # A row of one value is worth that value.
    values = [combinations(sorted(row), min(2, len(row))) for row in rows]
    pairs = [sum(1 << bits.setdefault(pair, len(bits)) for pair in row) for row in values]
    chosen, left = [], (1 << len(bits)) - 1
    while left:
        best = max(range(len(rows)), key=lambda index: (pairs[index] & left).bit_count())
        chosen.append(best)
        left &= ~pairs[best]
    return chosen


def spread(rows: Sequence[Collection[Hashable]], count: int) -> list[int]:
    """Indices of `count` rows at most: each next one has the most values that those before it have not."""
    left, seen, chosen = list(range(len(rows))), set[Hashable](), list[int]()
    while left and len(chosen) < count:
        best = max(left, key=lambda index: len(set(rows[index]) - seen))
        left.remove(best)
        chosen.append(best)
        seen |= set(rows[best])
    return chosen
