"""Shapes in which a verifier's rounds are captured: batch sizes by width of the trees, and numbers of prompt pieces."""

from typing import NamedTuple

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.buckets import MOST_GRAPHS, batch_buckets, bucket_for, within
from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.round.choice import Choosing
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS

MOST_ROWS = 2048
"""Rows (sequences x nodes) of the largest graph."""
_NODE_BUCKETS = (4, 8, 16, 32)
_CHAIN_BUCKETS = (4, 6, 8, 16, 32)
"""Widths for chains: where matrix products are compute-bound, the last nodes of a chain cost most and are accepted
least."""
_FEW_SEQS, _FEW_NODES = 16, 16
"""Most sequences, or most nodes of a whole tree, for which all widths are captured; engines above both limits capture
every second width of `_NODE_BUCKETS`."""
OF_ANOTHER_WIDTH = 12
"""Graphs beyond `MOST_GRAPHS` for engines with many sequences and narrow trees, which get an additional width."""
_CHOICES_APART = 16
"""Ratio between the batch sizes in which the choice of tokens is captured."""
_MIXED: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((128, 512), (2, 8, 32)),
    ((128, 512), (2, 8)),
    ((128,), (2, 8, 32)),
    ((128,), (8, 32)),
    ((128,), (8,)),
)
"""Candidates for the graphs of mixed rounds: (most decode rows of each batch size, numbers of pieces); the first
candidate within the limit of graphs is taken. The first 128 rows of a pass cost almost nothing; with more rows the
matrix products take as long as their launches."""
_PROMPTS = (4, 8, 12, 16, 24, 32)
"""Numbers of pieces in rounds of prompts alone. Up to 12 pieces are computed in the time of their launches, padded or
not; with more pieces less than a third is padding. Rounds larger than 32 pieces compute longer than their kernels take
to launch."""
_SIZES_KEPT = 5
"""Batch sizes of each width that are reserved for rounds of decodes alone before mixed rounds get any graphs."""
_MOST_PADDED = 384
"""Rows up to which a mixed graph's computation takes no longer than the launches it saves, however much of it is
padding."""


class RoundShapes(NamedTuple):
    """Shapes in which rounds of one tree width are captured; all fields ascending."""

    forwards: tuple[int, ...]
    """Batch sizes of forward passes over decodes alone."""
    choices: tuple[int, ...]
    """Batch sizes in which the choice of tokens is captured; the largest equals that of `forwards`."""
    mixed: tuple[int, ...]
    """Batch sizes of forward passes with prompt chunks beside the decodes."""
    pieces: tuple[int, ...]
    """Numbers of pieces with which each batch size of `mixed` is captured."""

    @property
    def most_pieces(self) -> int:
        """Pieces in the largest mixed graph; 0 without mixed graphs."""
        return max(self.pieces, default=0)

    def mixed_bucket(self, num_nodes: int, num_reqs: int, num_pieces: int) -> Bucket | None:
        """Bucket of the graph for a mixed round.

        None if the round is too large for any graph, or would be mostly padding.
        """
        if not self.mixed or num_reqs > self.mixed[-1] or num_pieces > self.pieces[-1]:
            return None
        beside = bucket_for(num_pieces, self.pieces) * PIECE_ROWS
        bucket = Bucket(bucket_for(num_reqs, self.mixed), num_nodes, beside)
        num_rows = num_reqs * num_nodes + num_pieces * PIECE_ROWS
        return bucket if bucket.num_rows <= max(_MOST_PADDED, 2 * num_rows) else None


def node_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Widths in which trees are verified, ascending; only adaptive speculation has widths below `num_nodes`."""
    most = config.speculation.num_nodes
    smaller = _CHAIN_BUCKETS if config.speculation.draft_top_k == 1 else _NODE_BUCKETS
    if config.max_num_seqs > _FEW_SEQS and not _is_narrow(config):
        smaller = _NODE_BUCKETS[::2]
    smaller = smaller if config.speculation.adaptive else ()
    return (*(n for n in smaller if n < most), most)


def _is_narrow(config: EngineConfig) -> bool:
    return config.speculation.num_nodes <= _FEW_NODES


def num_graphs(config: EngineConfig) -> int:
    """Most graphs that `wingbeat.runtime.round.decode_graphs.DecodeGraphs` captures."""
    return len(prompt_pieces(config)) + sum(
        len(shape.forwards) + len(Choosing) * len(shape.choices) + len(shape.mixed) * len(shape.pieces)
        for shape in round_shapes(config).values()
    )


def prompt_pieces(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of pieces in which rounds of prompts alone are captured, ascending; not counted in `MOST_GRAPHS`."""
    if config.cuda_graphs == "decode_only":
        return ()
    possible = pieces_at_most(config.max_num_batched_tokens, config.max_num_seqs)
    return tuple(dict.fromkeys(min(number, possible) for number in _PROMPTS))


def pieces_at_most(num_tokens: int, num_chunks: int) -> int:
    """Most pieces into which `num_tokens` tokens in at most `num_chunks` prompt chunks can be cut."""
    num_chunks = min(num_chunks, num_tokens)
    return (num_tokens - num_chunks) // PIECE_ROWS + num_chunks if num_chunks else 0


def round_shapes(config: EngineConfig) -> dict[int, RoundShapes]:
    """Captured shapes by nodes per sequence (1 for bare roots).

    Leaves out widths at which a single sequence exceeds `MOST_ROWS`.
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
    """Batch sizes by width, and numbers of pieces, of mixed rounds within a limit of `most` graphs."""
    possible = pieces_at_most(config.max_num_batched_tokens, config.max_num_seqs - 1)
    for rows, numbers in _MIXED if possible else ():
        pieces = tuple(dict.fromkeys(min(number, possible) for number in numbers))
        kept = {n: tuple(dict.fromkeys(_largest(sizes, limit // n) for limit in rows)) for n, sizes in batches.items()}
        if len(pieces) * sum(map(len, kept.values())) <= most:
            return kept, pieces
    return dict.fromkeys(batches, ()), ()


def _largest(sizes: tuple[int, ...], limit: int) -> int:
    """The largest size within a limit, or the smallest of all."""
    return max((size for size in sizes if size <= limit), default=sizes[0])
