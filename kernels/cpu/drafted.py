"""Drafted trees on the host by the C++ of `drafted.h`: which are believed, which of their nodes are verified, and
where these lie."""

from collections import deque
from ctypes import CDLL, POINTER, Array, Structure, addressof, byref, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor


class TreeColumns(Structure):
    """Five columns of trees."""

    _fields_ = [(name, c_void_p) for name in ("token_ids", "parents", "depths", "scores", "num_valid")]

    @classmethod
    def of(cls, fields: tuple[Tensor, ...]) -> "TreeColumns":
        """Contiguous tensors in this order: scores float32, the others int64."""
        return cls(*(field.data_ptr() for field in fields))


class Answer(Structure):
    """What a drafter sent, and where sequences are."""

    _fields_ = [
        ("num_reqs", c_int64),
        ("num_nodes", c_int64),
        ("slots", c_void_p),
        ("wanted", c_void_p),
        ("trees", TreeColumns),
        *((name, c_void_p) for name in ("epochs", "committed_lens", "own_epochs", "own_lens", "last_token_ids")),
        ("vocab", c_int64),
        ("chains", c_int64),
    ]


class Choice(Structure):
    """What nodes are chosen by; all null where all stay."""

    _fields_ = [
        ("max_depth", c_int64),
        *((name, c_void_p) for name in ("kinds", "useful", "forced", "table", "edges")),
        ("num_bins", c_int64),
        ("price", c_void_p),
    ]


class Layout(Structure):
    """Where rows go."""

    _fields_ = [
        ("block_tables", c_void_p),
        *((name, c_int64) for name in ("num_blocks", "block_size", "last_position", "shows_ancestors")),
    ]


class Intake(Structure):
    """All of it."""

    _fields_ = [("answer", Answer), ("choice", Choice), ("layout", Layout)]


class Taken(Structure):
    """Sizes of what is left."""

    _fields_ = [(name, c_int64) for name in ("believed", "width", "num_rows", "num_blocks", "num_drafting", "levels")]


TreeFields = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Token ids, parents, depths, scores [num_reqs, num_nodes] and the number of valid nodes [num_reqs]."""


class Sent(NamedTuple):
    """A reply as it lies, by slot; contiguous, on the host, int64 but for the scores."""

    trees: TreeFields
    epochs: Tensor | None
    """As the next one, None where the trees are checked, and lie by request."""
    committed_lens: Tensor | None


class Present(NamedTuple):
    """Where the sequences of all slots are, at addresses that stay; int64 [num_slots or more] but for the last."""

    epochs: Tensor
    committed_lens: Tensor
    last_token_ids: Tensor
    block_tables: Tensor
    """int64 [num_slots or more, num_blocks]"""


class Shape(NamedTuple):
    """What trees and rows are like."""

    vocab_size: int
    chains: bool
    """Each node must follow the one before it."""
    block_size: int
    last_position: int
    """That the model has."""


class NodeChoice(NamedTuple):
    """What nodes are chosen by: the best of all trees together, as many as are worth their price."""

    table: Tensor
    """float64 [num_kinds, num_bins], contiguous: acceptance by bin of the confidence, by kind of tree."""
    edges: Tensor
    """float64 [num_bins - 1], ascending."""
    prices: Tensor | None
    """float64 [num_reqs * num_nodes or more], contiguous, in tokens: of a pass with so many drafted nodes; None takes
    all."""
    useful: list[int]
    """By request: levels that could still be emitted."""
    forced: list[bool]
    """By request: all useful nodes stay."""
    kinds: list[int]
    """By request: the row of the table."""
    max_depth: int
    """Of nodes that count."""


class TakenTrees(NamedTuple):
    """What is verified of trees, and where it lies; int64 [num_reqs, width] as a rule. Gone after three more calls."""

    trees: TreeFields
    roots: Tensor
    """[num_reqs]: positions."""
    positions: Tensor
    mapping: Tensor
    """Address in the pool; 0 for padding."""
    rows: Tensor
    """Row of each node; any row for padding."""
    starts: Tensor
    """[num_reqs + 1]: first row of each tree."""
    flat: tuple[Tensor, Tensor, Tensor, Tensor]
    """[num_rows] each: index of each row among the nodes, its token, position and address."""
    ancestors: Tensor | None
    """[num_reqs, width, words]: see `wingbeat.kernels.tree.reference.ancestor_words`; None of chains."""
    evidence: Tensor | None
    """[num_reqs, num_nodes]: see `wingbeat.runtime.speculation.acceptance`; None where all nodes stay."""
    block_tables: Tensor
    """[num_reqs, num_blocks], as far as the longest sequence goes, and no further than twice that."""
    num_drafting: int
    """Trees that had a node before."""
    levels: int
    """Depth of the deepest node before."""

    @property
    def is_bare(self) -> bool:
        """Whether only roots are left."""
        return self.positions.shape[1] == 1


MOST_KEPT = 256
"""Shapes of rounds whose views are kept."""
MOST_SOURCES = 4
"""Trees whose addresses are."""


class DraftIntake:
    """Takes trees in; every tensor is contiguous and on the host.

    Args:
        library: of `wingbeat.kernels.cpu.library`.
    """

    def __init__(self, library: CDLL, present: Present, shape: Shape) -> None:
        library.wingbeat_check_trees.argtypes = [POINTER(Answer), POINTER(TreeColumns)]
        library.wingbeat_check_trees.restype = c_int64
        library.wingbeat_take_trees.argtypes = [POINTER(Intake), c_void_p, c_void_p, POINTER(Taken)]
        library.wingbeat_take_trees.restype = None
        self._check, self._take = library.wingbeat_check_trees, library.wingbeat_take_trees
        self._present, self._shape = present, shape
        tables = present.block_tables
        self._layout = Layout(
            tables.data_ptr(), tables.shape[1], shape.block_size, shape.last_position, not shape.chains
        )
        self._bare = Sent((None,) * 5, None, None)
        num_slots = len(present.epochs)
        self._useful, self._forced, self._kinds = (_numbers([0] * num_slots) for _ in range(3))
        self._sources: dict[int, _Source] = {}
        self._taken = Taken()
        self._taken_reference = byref(self._taken)
        # Two for a round, whose trees may turn out to be bare; a round is settled before the one after the next begins.
        self._rooms = deque(_Room(tables, not shape.chains) for _ in range(4))

    def roots(self, slots: Tensor) -> TakenTrees:
        """Bare roots of sequences in `slots`, int64 [num_reqs], laid out."""
        return self.take(slots, None, self._bare)

    def check(self, slots: Tensor, wanted: Tensor, sent: Sent) -> TreeFields | None:
        """One tree per decode, a bare root where what was sent does not count; None where nothing does.

        Args:
            slots: int64 [num_reqs].
            wanted: bool [num_reqs]: a tree was asked for.
        """
        answer, num_reqs = self._source(sent).answer, len(slots)
        answer.num_reqs, answer.slots, answer.wanted = num_reqs, slots.data_ptr(), wanted.data_ptr()
        ids = torch.empty(3, num_reqs, answer.num_nodes, dtype=torch.int64)
        into = (*ids.unbind(), torch.empty(ids.shape[1:]), slots.new_empty(num_reqs))
        width = self._check(byref(answer), byref(TreeColumns.of(into)))
        return None if not width else (*(field[:, :width] for field in into[:4]), into[4])

    def take(self, slots: Tensor, wanted: Tensor | None, sent: Sent, by: NodeChoice | None = None) -> TakenTrees | None:
        """Check trees, choose what is verified of them and lay it out; None where no tree counts.

        Args:
            slots: int64 [num_reqs].
            wanted: bool [num_reqs]: a tree was asked for; not read where trees are checked.
            by: None verifies all nodes.
        """
        num_reqs, taken = len(slots), self._taken
        source = self._source(sent)
        answer, choice, room = source.answer, source.choice, self._rooms[0]
        answer.num_reqs, answer.slots, answer.wanted = num_reqs, slots.data_ptr(), _address(wanted)
        choice.table = None
        if by is not None:
            self._useful[:num_reqs], self._forced[:num_reqs], self._kinds[:num_reqs] = by.useful, by.forced, by.kinds
            choice.max_depth, choice.price = by.max_depth, _address(by.prices)
            choice.table, choice.edges, choice.num_bins = by.table.data_ptr(), by.edges.data_ptr(), by.table.shape[1]
        self._rooms.rotate()
        room.reserve(num_reqs * (source.num_nodes * (12 + source.num_words) + 3) + 1)
        self._take(source.reference, *room.addresses, self._taken_reference)
        return room.views(taken, num_reqs, source.num_nodes if by is not None else 0) if taken.believed else None

    def _source(self, sent: Sent) -> "_Source":
        """Trees as the library reads them; those of the latest ones are kept, of which a channel has two."""
        source = self._sources.get(id(sent))
        if source is None:
            if len(self._sources) == MOST_SOURCES:
                self._sources.clear()
            places = addressof(self._kinds), addressof(self._useful), addressof(self._forced)
            source = self._sources[id(sent)] = _Source(sent, self._present, self._shape, self._layout, places)
        return source


class _Source:
    """Trees, and what is asked of them."""

    def __init__(
        self, sent: Sent, present: Present, shape: Shape, layout: Layout, places: tuple[int, int, int]
    ) -> None:
        self.sent = sent
        self.num_nodes = 1 if sent.trees[0] is None else sent.trees[0].shape[1]
        self.num_words = 0 if shape.chains else -(-self.num_nodes // 64)
        self._intake = Intake(Answer(), Choice(0, *places), layout)
        self.reference, self.answer, self.choice = byref(self._intake), self._intake.answer, self._intake.choice
        trees, ends = TreeColumns(*map(_address, sent.trees)), (sent.epochs, sent.committed_lens, *present[:3])
        self._intake.answer = Answer(0, self.num_nodes, None, None, trees, *map(_address, ends), shape[0], shape.chains)


class _Room:
    """Where one round's trees are left, and views of it: making one takes longer than what is computed.

    Args:
        block_tables: as `Present`.
        has_words: of the nodes' ancestors.
    """

    def __init__(self, block_tables: Tensor, has_words: bool) -> None:
        self._has_words = has_words
        self._out = torch.empty(0, dtype=torch.int64)
        self._tables = torch.zeros_like(block_tables)  # behind what is copied there may be anybody's blocks
        self._views: dict[tuple[int, ...], tuple] = {}
        self.addresses = 0, self._tables.data_ptr()

    def reserve(self, size: int) -> None:
        """Have room for so many numbers."""
        if size > len(self._out):
            self._out = torch.empty(size, dtype=torch.int64)
            self.addresses = self._out.data_ptr(), self._tables.data_ptr()
            self._views.clear()

    def views(self, taken: Taken, num_reqs: int, num_seen: int) -> TakenTrees:
        """What lies there, part by part.

        Args:
            num_seen: nodes of a tree that there is evidence of.
        """
        blocks = min(1 << (taken.num_blocks - 1).bit_length(), self._tables.shape[1])
        key = (num_reqs, taken.width, taken.num_rows, blocks, num_seen)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= MOST_KEPT:
                self._views.clear()
            words = -(-taken.width // 64) if self._has_words else 0
            parts = _parts(self._out, num_reqs, taken.width, taken.num_rows, num_seen, words)
            found = self._views[key] = (*parts, self._tables[:num_reqs, :blocks])
        return TakenTrees(*found, taken.num_drafting, taken.levels)


def _parts(out: Tensor, num_reqs: int, width: int, num_rows: int, num_seen: int, num_words: int) -> tuple:
    """The tensors of `TakenTrees`, as the library leaves them one behind another, but for the block tables."""
    nodes = num_reqs * width
    sizes = [num_reqs * num_seen, num_reqs, num_reqs, *[nodes] * 7, num_reqs + 1, *[num_rows] * 4, nodes * num_words]
    parts = out[: sum(sizes)].split_with_sizes(sizes)
    evidence, num_valid, roots, *by_node, scores, starts, at, ids, positions, mapping, words = parts
    token_ids, parents, depths, *where = (part.view(num_reqs, width) for part in by_node)
    scores = scores.view(torch.float32)[:nodes].view(num_reqs, width)
    return (
        (token_ids, parents, depths, scores, num_valid),
        roots,
        *where,
        starts,
        (at, ids, positions, mapping),
        words.view(num_reqs, width, num_words) if num_words else None,
        evidence.view(num_reqs, num_seen) if num_seen else None,
    )


def _numbers(values: list[int] | list[bool]) -> Array:
    return (c_int64 * len(values))(*values)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
