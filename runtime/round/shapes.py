"""Which shapes of a verifier's rounds are captured: batch sizes by width of the trees, and pieces of prompt chunks."""

from typing import NamedTuple

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.buckets import MOST_GRAPHS, batch_buckets, bucket_for, within
from wingbeat.runtime.graphs.graph_runner import Bucket
from wingbeat.runtime.round.choice import Choosing
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS

MOST_ROWS = 2048
"""Nodes of a whole batch in the largest graph."""
_NODE_BUCKETS = (4, 8, 16, 32)
_CHAIN_BUCKETS = (4, 6, 8, 16, 32)
"""Of chains: where products are bound by computation, the last nodes of a chain cost most and are accepted least."""
_FEW_SEQS, _FEW_NODES = 16, 16
"""Most sequences, or nodes of a whole tree, that leave graphs for all of these; other engines have every second one."""
OF_ANOTHER_WIDTH = 12
"""Graphs beside `MOST_GRAPHS` where narrow trees of many sequences have a width between the smallest and the whole."""
_CHOICES_APART = 16
"""Times the batch before: sizes in which tokens are chosen."""
_MIXED: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((128, 512), (2, 8, 32)),
    ((128, 512), (2, 8)),
    ((128,), (2, 8, 32)),
    ((128,), (8, 32)),
    ((128,), (8,)),
)
"""Of mixed rounds, the first that there are graphs for: most rows of decodes in each batch size, numbers of pieces. The
first 128 rows of a pass cost next to nothing; of more than these the products take as long as their launches do."""
_PROMPTS = (4, 8, 12, 16, 24, 32)
"""Pieces of rounds of prompts alone. Up to 12 of them are computed in the time of their launches, padded or not; above,
less than a third is padding. Rounds of more compute longer than their kernels take to launch."""
_SIZES_KEPT = 5
"""Batch sizes of each width that rounds of decodes alone have, if there are so many, before mixed ones have any."""
_MOST_PADDED = 384
"""Rows of a mixed graph that takes no longer than the launches it saves, by computation, whatever of it is padding."""


class RoundShapes(NamedTuple):
    """Shapes that rounds of one width are captured in, each ascending."""

    forwards: tuple[int, ...]
    """Batch sizes of forward passes over decodes alone."""
    choices: tuple[int, ...]
    """Batch sizes in which tokens are chosen; the largest is that of `forwards`."""
    mixed: tuple[int, ...]
    """Batch sizes of forward passes with prompt chunks beside the decodes."""
    pieces: tuple[int, ...]
    """Numbers of pieces that each of these is captured with."""

    @property
    def most_pieces(self) -> int:
        """In the largest of the mixed graphs; 0 without any."""
        return max(self.pieces, default=0)

    def mixed_bucket(self, num_nodes: int, num_reqs: int, num_pieces: int) -> Bucket | None:
        """The graph that a mixed round runs in; None where it is too large for any, or mostly padding."""
        if not self.mixed or num_reqs > self.mixed[-1] or num_pieces > self.pieces[-1]:
            return None
        beside = bucket_for(num_pieces, self.pieces) * PIECE_ROWS
        bucket = Bucket(bucket_for(num_reqs, self.mixed), num_nodes, beside)
        num_rows = num_reqs * num_nodes + num_pieces * PIECE_ROWS
        return bucket if bucket.num_rows <= max(_MOST_PADDED, 2 * num_rows) else None


def node_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Widths that trees are verified in, ascending: pruned ones in the smallest that pays, others as configured."""
    most = config.speculation.num_nodes
    smaller = _CHAIN_BUCKETS if config.speculation.draft_top_k == 1 else _NODE_BUCKETS
    if config.max_num_seqs > _FEW_SEQS and not _is_narrow(config):
        smaller = _NODE_BUCKETS[::2]
    smaller = smaller if config.speculation.adaptive else ()
    return (*(n for n in smaller if n < most), most)


def _is_narrow(config: EngineConfig) -> bool:
    return config.speculation.num_nodes <= _FEW_NODES


def num_graphs(config: EngineConfig) -> int:
    """Graphs that `wingbeat.runtime.round.decode_graphs.DecodeGraphs` captures at most."""
    return len(prompt_pieces(config)) + sum(
        len(shape.forwards) + len(Choosing) * len(shape.choices) + len(shape.mixed) * len(shape.pieces)
        for shape in round_shapes(config).values()
    )


def prompt_pieces(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of pieces in which rounds of prompts alone are captured, ascending; beside `MOST_GRAPHS`."""
    if config.cuda_graphs == "decode_only":
        return ()
    possible = pieces_at_most(config.max_num_batched_tokens, config.max_num_seqs)
    return tuple(dict.fromkeys(min(number, possible) for number in _PROMPTS))


def pieces_at_most(num_tokens: int, num_chunks: int) -> int:
    """Pieces of so many tokens, in at most so many prompt chunks."""
    num_chunks = min(num_chunks, num_tokens)
    return (num_tokens - num_chunks) // PIECE_ROWS + num_chunks if num_chunks else 0


def round_shapes(config: EngineConfig) -> dict[int, RoundShapes]:
    """By nodes per sequence, 1 for bare roots; widths of which one sequence has too many rows are left out."""
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
    """Batch sizes by width, and numbers of pieces, of mixed rounds in at most so many graphs."""
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
