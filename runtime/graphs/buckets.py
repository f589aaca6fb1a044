"""Which batch sizes are captured: a batch is padded to the smallest one that holds it, and there are only so many."""

from collections.abc import Sequence

MOST_GRAPHS = 60
"""Of a verifier, and of a drafter: each one costs seconds at the start, and memory of its own."""
_FREE_ROWS = 128
"""Rows that a pass has for next to nothing: so long its products take as long as the weights take to be read."""
_FARTHEST = 8
"""Times the batch before: beside the products, padding costs too."""


def batch_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: 1, 2, 4, 8, then steps of 8 to 64, 16 to 256 and 32 beyond; ends with `max_num_seqs`.

    Raises:
        ValueError: `max_num_seqs` is below 1.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {max_num_seqs}: use at least 1")
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32))
    return (*(n for n in steps if n < max_num_seqs), max_num_seqs)


def bucket_for(n: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `n`.

    Args:
        buckets: ascending.

    Raises:
        ValueError: `n` is below 1 or above the largest bucket.
    """
    if n < 1:
        raise ValueError(f"{n} has no bucket: buckets start at 1")
    for bucket in buckets:
        if n <= bucket:
            return bucket
    raise ValueError(f"{n} has no bucket: the largest is {buckets[-1]}")


def within(most: int, batches: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Of each shape's batch sizes as many as `most` graphs allow, so that padding costs each about as much.

    The first and the last of each stay, however many these are.

    Args:
        batches: by rows of one sequence: sizes, ascending.
    """
    ratio, kept = 1.0, batches
    while sum(map(len, kept.values())) > most and any(len(sizes) > 2 for sizes in kept.values()):
        ratio *= 1.05
        farthest = max(ratio, _FARTHEST)
        kept = {rows: _apart(sizes, rows, ratio, farthest) for rows, sizes in batches.items()}
    return kept


def draft_batches(max_num_seqs: int, max_path: int, top_k: int) -> tuple[int, ...]:
    """Batch sizes of a drafter that has a graph for each depth, and one for what was decided: `max_path` of each.

    Args:
        top_k: rows of one sequence in a level.
    """
    [kept] = within(MOST_GRAPHS // max_path, {top_k: batch_buckets(max_num_seqs)}).values()
    return kept


def _apart(sizes: tuple[int, ...], rows: int, ratio: float, farthest: float) -> tuple[int, ...]:
    """Sizes of which each costs `ratio` times the one before, or is `farthest` times as large."""
    kept = list(sizes[:1])
    for size, following in zip(sizes[1:], (*sizes[2:], None), strict=True):
        cost, before = _FREE_ROWS + size * rows, _FREE_ROWS + kept[-1] * rows
        if following is None or cost >= ratio * before or size >= farthest * kept[-1]:
            kept.append(size)
    return tuple(kept)
