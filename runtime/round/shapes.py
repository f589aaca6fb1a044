"""Shapes in which a verifier's rounds are captured: batch sizes by nodes per tree."""

from typing import Any, NamedTuple

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.buckets import MOST_GRAPHS, batch_buckets, within
from wingbeat.runtime.parts import first_result, hooks
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
_SIZES_KEPT = 5
"""Number of batch sizes of each width that are reserved for rounds without prompt chunks. Mixed rounds get only the
graphs that the limit `MOST_GRAPHS` allows in addition to these.
"""


class RoundShapes(NamedTuple):
    """Shapes in which rounds of one tree width are captured; all fields ascending."""

    forwards: tuple[int, ...]
    """Batch sizes of forward passes over decodes without prompt chunks."""
    choices: tuple[int, ...]
    """Batch sizes in which the choice of tokens is captured; the largest size equals the largest size of `forwards`."""


class CapturedShapes(NamedTuple):
    """Shapes of all captured rounds."""

    decodes: dict[int, RoundShapes]
    """Shapes by number of nodes per sequence; 1 for bare roots."""
    prompts: Any
    """Shapes of rounds with prompt chunks, see the hook `prompt_shapes`; None if no part captures them."""


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
    decodes, prompts = round_shapes(config)
    forwards = sum(len(shape.forwards) for shape in decodes.values()) + (0 if prompts is None else prompts.num_graphs)
    return len(variants(config)) * forwards + len(Choosing) * sum(len(shape.choices) for shape in decodes.values())


def variants(config: EngineConfig) -> tuple[bool, ...]:
    """Values of `lean` for which forward passes are captured, see `BatchBuilder.is_lean`.

    Lean passes do not count towards `MOST_GRAPHS`: with fewer batch sizes, all rounds would have more padding.
    """
    return (False, True) if any(has_lean(config) for has_lean in hooks("lean_rounds")) else (False,)


def pieces_at_most(num_tokens: int, num_chunks: int) -> int:
    """Maximum number of pieces into which `num_tokens` tokens in at most `num_chunks` prompt chunks can be cut."""
    num_chunks = min(num_chunks, num_tokens)
    return (num_tokens - num_chunks) // PIECE_ROWS + num_chunks if num_chunks else 0


def round_shapes(config: EngineConfig) -> CapturedShapes:
    """Returns the captured shapes.

    Widths at which a single sequence has more rows than `MOST_ROWS` are left out.
    """
    sizes = batch_buckets(config.max_num_seqs)
    batches = {n: tuple(size for size in sizes if size * n <= MOST_ROWS) for n in (1, *node_buckets(config))}
    batches = {num_nodes: fitting for num_nodes, fitting in batches.items() if fitting}
    choices = {num_nodes: _choices(fitting) for num_nodes, fitting in batches.items()}
    widened = config.max_num_seqs > _FEW_SEQS and config.speculation.adaptive and _is_narrow(config)
    room = MOST_GRAPHS + widened * OF_ANOTHER_WIDTH - len(Choosing) * sum(map(len, choices.values()))
    kept = sum(min(len(fitting), _SIZES_KEPT) for fitting in batches.values())
    prompts = first_result("prompt_shapes", config, batches, room - kept)
    forwards = within(room - (0 if prompts is None else prompts.num_mixed()), batches)
    return CapturedShapes({n: RoundShapes(forwards[n], choices[n]) for n in batches}, prompts)


def _choices(batches: tuple[int, ...]) -> tuple[int, ...]:
    kept = [batches[0]]
    kept += [size for size in batches if size >= _CHOICES_APART * kept[-1]][:1]
    return tuple(dict.fromkeys((*kept, batches[-1])))
