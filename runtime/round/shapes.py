"""Shapes in which a verifier's rounds are captured: batch sizes by nodes per tree, and numbers of prompt pieces."""

from typing import NamedTuple

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.buckets import MOST_GRAPHS, batch_buckets, bucket_for, within
from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.round.choice import Choosing
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS

MOST_ROWS = 2048
"""Number of rows (sequences x nodes per tree) of the largest graph."""
_NODE_BUCKETS = (4, 8, 16, 32)
_CHAIN_BUCKETS = (4, 6, 8, 16, 32)
"""Widths below `num_nodes` at which chains are verified. The steps are finer than for trees: if matrix products are
compute-bound, the last nodes of a chain cost as much as the first but are rarely accepted."""
_FEW_SEQS, _FEW_NODES = 16, 16
"""All widths are captured for engines of at most this many sequences, or with trees of at most this many nodes. Engines
with more sequences and larger trees capture every second width of `_NODE_BUCKETS`."""
OF_ANOTHER_WIDTH = 12
"""Number of graphs allowed beyond `MOST_GRAPHS` for engines with many sequences and narrow trees, which get more
widths."""
_CHOICES_APART = 16
"""The choice of tokens is captured in only a few batch sizes; the second size is at least this many times the first."""
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
_SIZES_KEPT = 5
"""Number of batch sizes of each width that are reserved for rounds without prompt chunks. Mixed rounds get only the
graphs that the limit `MOST_GRAPHS` allows in addition to these.
"""
_MOST_PADDED = 384
"""Number of rows up to which a mixed graph is used even if most rows are padding, because computing so few rows takes
no longer than the kernel launches that a graph saves."""


class RoundShapes(NamedTuple):
    """Shapes in which rounds of one tree width are captured; all fields ascending."""

    forwards: tuple[int, ...]
    """Batch sizes of forward passes over decodes without prompt chunks."""
    choices: tuple[int, ...]
    """Batch sizes in which the choice of tokens is captured; the largest size equals the largest size of `forwards`."""
    mixed: tuple[int, ...]
    """Batch sizes of forward passes with prompt chunks beside the decodes."""
    pieces: tuple[int, ...]
    """Numbers of pieces with which each batch size of `mixed` is captured."""

    @property
    def most_pieces(self) -> int:
        """Number of pieces in the largest mixed graph; 0 without mixed graphs."""
        return max(self.pieces, default=0)

    def mixed_bucket(self, num_nodes: int, num_reqs: int, num_pieces: int) -> Bucket | None:
        """Returns the bucket of the graph for a mixed round.

        Returns None if the round is too large for every graph, or if the graph would be mostly padding.
        """
        if not self.mixed or num_reqs > self.mixed[-1] or num_pieces > self.pieces[-1]:
            return None
        beside = bucket_for(num_pieces, self.pieces) * PIECE_ROWS
        bucket = Bucket(bucket_for(num_reqs, self.mixed), num_nodes, beside)
        num_rows = num_reqs * num_nodes + num_pieces * PIECE_ROWS
        return bucket if bucket.num_rows <= max(_MOST_PADDED, 2 * num_rows) else None


def node_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Returns the widths (nodes per tree) in which trees are verified, ascending.

    Only adaptive speculation has widths below `num_nodes`.
    """
    most = config.speculation.num_nodes
    smaller = _CHAIN_BUCKETS if config.speculation.draft_top_k == 1 else _NODE_BUCKETS
    if config.max_num_seqs > _FEW_SEQS and not _is_narrow(config):
        smaller = _NODE_BUCKETS[::2]
    smaller = smaller if config.speculation.adaptive else ()
    return (*(n for n in smaller if n < most), most)


def _is_narrow(config: EngineConfig) -> bool:
    return config.speculation.num_nodes <= _FEW_NODES


def num_graphs(config: EngineConfig) -> int:
    """Maximum number of graphs that `wingbeat.runtime.round.decode_graphs.DecodeGraphs` captures."""
    return len(prompt_pieces(config)) + sum(
        len(shape.forwards) + len(Choosing) * len(shape.choices) + len(shape.mixed) * len(shape.pieces)
        for shape in round_shapes(config).values()
    )


def prompt_pieces(config: EngineConfig) -> tuple[int, ...]:
    """Returns the numbers of pieces for which rounds without decodes are captured, ascending.

    These graphs do not count towards `MOST_GRAPHS`.
    """
    if config.cuda_graphs == "decode_only":
        return ()
    possible = pieces_at_most(config.max_num_batched_tokens, config.max_num_seqs)
    return tuple(dict.fromkeys(min(number, possible) for number in _PROMPTS))


def pieces_at_most(num_tokens: int, num_chunks: int) -> int:
    """Maximum number of pieces into which `num_tokens` tokens in at most `num_chunks` prompt chunks can be cut."""
    num_chunks = min(num_chunks, num_tokens)
    return (num_tokens - num_chunks) // PIECE_ROWS + num_chunks if num_chunks else 0


def round_shapes(config: EngineConfig) -> dict[int, RoundShapes]:
    """Returns the captured shapes by number of nodes per sequence (1 for bare roots).

    Widths at which a single sequence has more rows than `MOST_ROWS` are left out.
    """
    sizes = batch_buckets(config.max_num_seqs)
    batches = {n: tuple(size for size in sizes if size * n <= MOST_ROWS) for n in (1, *node_buckets(config))}
    batches = {num_nodes: fitting for num_nodes, fitting in batches.items() if fitting}
    choices = {num_nodes: _choices(fitting) for num_nodes, fitting in batches.items()}
    widened = config.max_num_seqs > _FEW_SEQS and config.speculation.adaptive and _is_narrow(config)
    room = MOST_GRAPHS + widened * OF_ANOTHER_WIDTH - len(Choosing) * sum(map(len, choices.values()))
    kept = sum(min(len(fitting), _SIZES_KEPT) for fitting in batches.values())
    if config.cuda_graphs == "decode_only":
        mixed, pieces = dict.fromkeys(batches, ()), ()
    else:
        mixed, pieces = _mixed(config, batches, room - kept)
    forwards = within(room - len(pieces) * sum(map(len, mixed.values())), batches)
    return {n: RoundShapes(forwards[n], choices[n], mixed[n], pieces) for n in batches}


def _choices(batches: tuple[int, ...]) -> tuple[int, ...]:
    kept = [batches[0]]
    kept += [size for size in batches if size >= _CHOICES_APART * kept[-1]][:1]
    return tuple(dict.fromkeys((*kept, batches[-1])))


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
