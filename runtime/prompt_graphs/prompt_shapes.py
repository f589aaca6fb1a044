"""Shapes in which rounds with prompt chunks are captured: batch sizes by nodes per tree, and numbers of pieces."""

from collections.abc import Iterable
from typing import NamedTuple

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.buckets import bucket_for
from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS
from wingbeat.runtime.round.shapes import pieces_at_most

_MIXED: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((128, 512), (2, 8, 32)),
    ((128, 512), (2, 8)),
    ((128,), (2, 8, 32)),
    ((128,), (8, 32)),
    ((128,), (8,)),
)
"""Candidates for the graphs of mixed rounds, as pairs: the maximum number of decode rows for each batch size, and the
numbers of pieces. The first candidate that stays within the limit of graphs is used. The first 128 rows of a pass cost
almost nothing; with more rows, the matrix products take as long as the launches of their kernels.
"""
_PROMPTS = (4, 8, 12, 16, 24, 32)
"""Numbers of pieces in rounds without decodes. Up to 12 pieces, padding costs no time, because launching the kernels
takes longer than computing the pieces. Beyond 12 pieces, less than a third of the pieces is padding. Rounds of more
than 32 pieces are not captured, because computing them takes longer than launching their kernels."""
_MOST_PADDED = 384
"""Number of rows up to which a mixed graph is used even if most rows are padding, because computing so few rows takes
no longer than the kernel launches that a graph saves."""


class PromptShapes(NamedTuple):
    """Shapes of captured rounds with prompt chunks; all numbers ascending."""

    mixed: dict[int, tuple[int, ...]]
    """Batch sizes of forward passes with prompt chunks beside the decodes, by nodes per sequence."""
    pieces: tuple[int, ...]
    """Numbers of pieces with which each batch size of `mixed` is captured."""
    prompts: tuple[int, ...]
    """Numbers of pieces for which rounds without decodes are captured. These graphs do not count towards
    `MOST_GRAPHS`."""

    @property
    def num_graphs(self) -> int:
        """Number of graphs."""
        return self.num_mixed() + len(self.prompts)

    def num_mixed(self, widths: Iterable[int] | None = None) -> int:
        """Number of graphs of mixed rounds of these widths; None counts all widths."""
        return len(self.pieces) * sum(len(self.mixed[n]) for n in (self.mixed if widths is None else widths))

    @property
    def most_pieces(self) -> int:
        """Number of pieces in the largest graph; 0 without graphs."""
        return max(*self.prompts, *self.pieces, 0, 0)

    def mixed_bucket(self, num_nodes: int, num_reqs: int, num_pieces: int) -> Bucket | None:
        """Returns the bucket of the graph for a mixed round.

        Returns None if the round is too large for every graph, or if the graph would be mostly padding.
        """
        sizes = self.mixed[num_nodes]
        if not sizes or num_reqs > sizes[-1] or num_pieces > self.pieces[-1]:
            return None
        beside = bucket_for(num_pieces, self.pieces) * PIECE_ROWS
        bucket = Bucket(bucket_for(num_reqs, sizes), num_nodes, beside)
        num_rows = num_reqs * num_nodes + num_pieces * PIECE_ROWS
        return bucket if bucket.num_rows <= max(_MOST_PADDED, 2 * num_rows) else None


def prompt_shapes(config: EngineConfig, batches: dict[int, tuple[int, ...]], most: int) -> PromptShapes:
    """Returns the shapes of rounds with prompt chunks, of which mixed rounds need at most `most` graphs.

    Args:
        batches: candidate batch sizes by nodes per sequence.
    """
    if config.cuda_graphs == "decode_only":
        return PromptShapes(dict.fromkeys(batches, ()), (), ())
    mixed, pieces = _mixed(config, batches, most)
    possible = pieces_at_most(config.max_num_batched_tokens, config.max_num_seqs)
    return PromptShapes(mixed, pieces, tuple(dict.fromkeys(min(number, possible) for number in _PROMPTS)))


def _mixed(
    config: EngineConfig, batches: dict[int, tuple[int, ...]], most: int
) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
    """Returns batch sizes by width, and numbers of pieces, of mixed rounds that need at most `most` graphs."""
    possible = pieces_at_most(config.max_num_batched_tokens, config.max_num_seqs - 1)
    for rows, numbers in _MIXED if possible else ():
        pieces = tuple(dict.fromkeys(min(number, possible) for number in numbers))
        kept = {n: tuple(dict.fromkeys(_largest(sizes, limit // n) for limit in rows)) for n, sizes in batches.items()}
        if len(pieces) * sum(map(len, kept.values())) <= most:
            return kept, pieces
    return dict.fromkeys(batches, ()), ()


def _largest(sizes: tuple[int, ...], limit: int) -> int:
    """Returns the largest size within a limit; the smallest size if all sizes exceed the limit."""
    return max((size for size in sizes if size <= limit), default=sizes[0])
