"""Chooses batch sizes to capture.

A batch is padded to the smallest captured size that holds it, and the number of graphs is bounded.
"""

from collections.abc import Sequence

MOST_GRAPHS = 60
"""Maximum number of graphs of a verifier, and of a drafter, because each graph costs seconds at start, and memory."""
_FREE_ROWS = 128
"""Number of rows that take almost no extra time in a pass, because the pass's matrix products take only the time to
read the weights.
"""
_FARTHEST = 8
"""Largest ratio of neighbouring batch sizes; limited because padding also costs time outside the matrix products."""


def batch_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Returns candidate batch sizes: 1, 2, 4, 8, then in steps of 8 up to 64, of 16 up to 256, and of 32 beyond.

    The last size is `max_num_seqs`.

    Raises:
        ValueError: `max_num_seqs` is below 1.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {max_num_seqs}: use at least 1")
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32))
    return (*(n for n in steps if n < max_num_seqs), max_num_seqs)


def bucket_for(n: int, buckets: Sequence[int]) -> int:
    """Returns the smallest bucket that holds `n`.

    Args:
        buckets: ascending sizes.

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
    """Keeps at most `most` batch sizes, chosen so that padding costs about the same between any two neighbouring sizes.

    The first and last batch size of each shape are kept, even if more than `most` sizes then remain.

    Args:
        batches: ascending batch sizes of each shape; keys are numbers of rows per sequence.
    """
    ratio, kept = 1.0, batches
    while sum(map(len, kept.values())) > most and any(len(sizes) > 2 for sizes in kept.values()):
        ratio *= 1.05
        farthest = max(ratio, _FARTHEST)
        kept = {rows: _apart(sizes, rows, ratio, farthest) for rows, sizes in batches.items()}
    return kept


def draft_batches(max_num_seqs: int, max_path: int, top_k: int) -> tuple[int, ...]:
    """Returns the batch sizes of a drafter.

    The drafter has `max_path` graphs per size: one for each depth, and one that commits decided tokens.

    Args:
        top_k: rows per sequence in a level.
    """
    [kept] = within(MOST_GRAPHS // max_path, {top_k: batch_buckets(max_num_seqs)}).values()
    return kept


def _apart(sizes: tuple[int, ...], rows: int, ratio: float, farthest: float) -> tuple[int, ...]:
    """Returns the first and last size, and the sizes between them that are far enough from the previous kept size.

    A size is far enough if its pass costs at least `ratio` times as much, or if the size is at least `farthest` times
    as large.
    """
    kept = list(sizes[:1])
    for size, following in zip(sizes[1:], (*sizes[2:], None), strict=True):
        cost, before = _FREE_ROWS + size * rows, _FREE_ROWS + kept[-1] * rows
        if following is None or cost >= ratio * before or size >= farthest * kept[-1]:
            kept.append(size)
    return tuple(kept)
