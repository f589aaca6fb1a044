"""When padding is taken out of a batch of trees of unequal sizes: in plain numbers."""

_LEAST_SAVED = 48
"""Padded nodes that a second group has to save: its own calls in every layer take as long as attention to so many."""


def best_split(lens: list[int]) -> int | None:
    """Nodes up to which trees are padded by themselves, apart from larger ones; None where that saves too little."""
    longest, num_reqs = max(lens), len(lens)
    best, most = None, _LEAST_SAVED - 1
    for num_short, width in enumerate(sorted(lens), start=1):
        saved = num_short * (longest - width)
        if saved > most and num_short < num_reqs:
            best, most = width, saved
    return best


def num_padded_apart(lens: list[int]) -> int:
    """Nodes of packed trees, the padding included that `best_split` leaves."""
    split, longest = best_split(lens), max(lens)
    return sum(split if split is not None and length <= split else longest for length in lens)


def worth_packing(num_rows: int, num_padded: int) -> bool:
    """Whether trees of unequal sizes are packed: a few rows are not worth the gathering in every layer."""
    return 8 * num_rows < 7 * num_padded
