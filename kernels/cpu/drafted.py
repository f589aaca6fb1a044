"""A verifier's intake of drafted trees on the host, in C++ (`drafted.h`): checking, node selection and row layout."""

from collections import deque
from ctypes import CDLL, POINTER, Array, Structure, addressof, byref, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor


class TreeColumns(Structure):
    """Pointers to the five columns of trees."""

    _fields_ = [(name, c_void_p) for name in ("token_ids", "parents", "depths", "scores", "num_valid")]

    @classmethod
    def of(cls, fields: tuple[Tensor, ...]) -> "TreeColumns":
        """Wraps contiguous tensors in field order: scores are float32, the others int64."""
        return cls(*(field.data_ptr() for field in fields))


class Answer(Structure):
    """A drafter's reply, and the present state of the sequences."""

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
    """Parameters of node selection; null pointers keep all nodes."""

    _fields_ = [
        ("max_depth", c_int64),
        *((name, c_void_p) for name in ("kinds", "useful", "forced", "table", "edges")),
        ("num_bins", c_int64),
        ("price", c_void_p),
    ]


class Layout(Structure):
    """Block tables and limits for the row layout."""

    _fields_ = [
        ("block_tables", c_void_p),
        *((name, c_int64) for name in ("num_blocks", "block_size", "last_position", "shows_ancestors")),
    ]


class Intake(Structure):
    """Input of the library's `wingbeat_take_trees`."""

    _fields_ = [("answer", Answer), ("choice", Choice), ("layout", Layout)]


class Taken(Structure):
    """Sizes of the results of `wingbeat_take_trees`."""

    _fields_ = [(name, c_int64) for name in ("is_usable", "width", "num_rows", "num_blocks", "num_drafting", "levels")]


TreeFields = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Token ids, parents, depths, scores [num_reqs, num_nodes] and the number of valid nodes [num_reqs]."""


class ReplyTensors(NamedTuple):
    """Tensors of a drafter's reply, by slot, in the memory where the drafter wrote them.

    All tensors are contiguous, on the host, and int64 except the scores.
    """

    trees: TreeFields
    epochs: Tensor | None
    """[num_slots]: epochs for which the trees were grown. `epochs` and `committed_lens` are None if the trees have been
    checked and are stored by request."""
    committed_lens: Tensor | None


class SlotTensors(NamedTuple):
    """Present state of all slots, at constant addresses: int64 [num_slots or more] except the block tables."""

    epochs: Tensor
    committed_lens: Tensor
    last_token_ids: Tensor
    block_tables: Tensor
    """int64 [num_slots or more, num_blocks]"""


class Shape(NamedTuple):
    """Limits of a round's trees and rows, constant for an engine."""

    vocab_size: int
    chains: bool
    """Whether each tree must be a chain: the parent of each node is the node before it."""
    block_size: int
    last_position: int
    """Highest position that the model supports."""


class NodeChoice(NamedTuple):
    """Parameters of node selection.

    Nodes of all trees are ranked together by their probability of acceptance, and the best ones are kept. The number of
    kept nodes maximises the expected number of accepted tokens minus the price of a pass with that many nodes.
    """

    table: Tensor
    """float64 [num_kinds, num_bins], contiguous: acceptance rate by kind of tree and bin of confidence."""
    edges: Tensor
    """float64 [num_bins - 1], ascending: bin edges."""
    prices: Tensor | None
    """float64 [num_reqs * num_nodes or more], contiguous: entry n is the cost in tokens of a pass with n drafted nodes.
    None keeps all nodes."""
    useful: list[int]
    """By request: number of levels whose tokens can still be emitted before the request ends."""
    forced: list[bool]
    """By request: whether all nodes at useful levels are kept."""
    kinds: list[int]
    """By request: index of the request's row in `table`."""
    max_depth: int
    """Maximum depth of a node; deeper nodes are dropped."""


class TakenTrees(NamedTuple):
    """Nodes to verify, and where they are stored: int64 [num_reqs, width] unless stated otherwise.

    The tensors are overwritten by the fourth call after the call that returned them.
    """

    trees: TreeFields
    roots: Tensor
    """[num_reqs]: positions of the roots."""
    positions: Tensor
    mapping: Tensor
    """Index of each node's row in the KV pool; 0 for padding."""
    rows: Tensor
    """Index of each node among the rows in `flat`; arbitrary for padding."""
    starts: Tensor
    """[num_reqs + 1]: first row of each tree."""
    flat: tuple[Tensor, Tensor, Tensor, Tensor]
    """[num_rows] each: index of the row among the padded nodes, its token, position and KV pool row."""
    ancestors: Tensor | None
    """[num_reqs, width, words]: see `wingbeat.kernels.tree.reference.ancestor_words`; None for chains."""
    evidence: Tensor | None
    """[num_reqs, num_nodes]: see `wingbeat.runtime.adaptive.acceptance`; None if all nodes are kept."""
    block_tables: Tensor
    """[num_reqs, num_blocks]; num_blocks is that of the longest sequence, rounded up to a power of two."""
    num_drafting: int
    """Number of trees that had a drafted node before selection."""
    levels: int
    """Depth of the deepest node before selection."""

    @property
    def is_bare(self) -> bool:
        """Whether only roots are left."""
        return self.positions.shape[1] == 1


MOST_KEPT = 256
"""Maximum number of round shapes whose tensor views are kept."""
MOST_SOURCES = 4
"""Maximum number of replies whose addresses are kept."""


class DraftIntake:
    """Intake of drafted trees. All tensors are contiguous and on the host.

    Args:
        library: from `wingbeat.kernels.cpu.library`.
    """

    def __init__(self, library: CDLL, present: SlotTensors, shape: Shape) -> None:
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
        self._bare = ReplyTensors((None,) * 5, None, None)
        num_slots = len(present.epochs)
        self._useful, self._forced, self._kinds = (_numbers([0] * num_slots) for _ in range(3))
        self._sources: dict[int, _Source] = {}
        self._taken = Taken()
        self._taken_reference = byref(self._taken)
        # A round may need two sets of buffers, because bare roots are laid out in a second set if no drafted tree is
        # usable. Round n is settled before round n + 2 begins, so four sets suffice.
        self._rooms = deque(_Room(tables, not shape.chains) for _ in range(4))

    def roots(self, slots: Tensor) -> TakenTrees:
        """Lays out bare roots for the sequences in `slots`, int64 [num_reqs]."""
        return self.lay_out(slots, None, self._bare)

    def check(self, slots: Tensor, wanted: Tensor, sent: ReplyTensors) -> TreeFields | None:
        """Returns one tree per decode, or None if no tree is usable. Sequences without a usable tree get a bare root.

        Args:
            slots: int64 [num_reqs].
            wanted: bool [num_reqs]: a tree was requested.
        """
        answer, num_reqs = self._source(sent).answer, len(slots)
        answer.num_reqs, answer.slots, answer.wanted = num_reqs, slots.data_ptr(), wanted.data_ptr()
        ids = torch.empty(3, num_reqs, answer.num_nodes, dtype=torch.int64)
        into = (*ids.unbind(), torch.empty(ids.shape[1:]), slots.new_empty(num_reqs))
        width = self._check(byref(answer), byref(TreeColumns.of(into)))
        return None if not width else (*(field[:, :width] for field in into[:4]), into[4])

    def lay_out(
        self, slots: Tensor, wanted: Tensor | None, sent: ReplyTensors, by: NodeChoice | None = None
    ) -> TakenTrees | None:
        """Checks trees, selects the nodes to verify and lays them out as rows. Returns None if no tree is usable.

        Args:
            slots: int64 [num_reqs].
            wanted: bool [num_reqs]: a tree was requested; ignored for trees that have already been checked.
            by: parameters of node selection; None keeps all nodes.
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
        return room.views(taken, num_reqs, source.num_nodes if by is not None else 0) if taken.is_usable else None

    def _source(self, sent: ReplyTensors) -> "_Source":
        """Returns the C++ description of a reply.

        The descriptions of the latest replies are kept, because a channel alternates between two reply buffers.
        """
        source = self._sources.get(id(sent))
        if source is None:
            if len(self._sources) == MOST_SOURCES:
                self._sources.clear()
            places = addressof(self._kinds), addressof(self._useful), addressof(self._forced)
            source = self._sources[id(sent)] = _Source(sent, self._present, self._shape, self._layout, places)
        return source


class _Source:
    """C++ description of a reply, with the intake parameters for its trees."""

    def __init__(
        self, sent: ReplyTensors, present: SlotTensors, shape: Shape, layout: Layout, places: tuple[int, int, int]
    ) -> None:
        self.sent = sent
        self.num_nodes = 1 if sent.trees[0] is None else sent.trees[0].shape[1]
        self.num_words = 0 if shape.chains else -(-self.num_nodes // 64)
        self._intake = Intake(Answer(), Choice(0, *places), layout)
        self.reference, self.answer, self.choice = byref(self._intake), self._intake.answer, self._intake.choice
        trees, ends = TreeColumns(*map(_address, sent.trees)), (sent.epochs, sent.committed_lens, *present[:3])
        self._intake.answer = Answer(0, self.num_nodes, None, None, trees, *map(_address, ends), shape[0], shape.chains)


class _Room:
    """Result buffers of one round. Views of them are kept, because creating views takes longer than the computation.

    Args:
        block_tables: as in `SlotState`.
        has_words: the results include ancestor words.
    """

    def __init__(self, block_tables: Tensor, has_words: bool) -> None:
        self._has_words = has_words
        self._out = torch.empty(0, dtype=torch.int64)
        self._tables = torch.zeros_like(block_tables)  # zeros, because columns after the copied ones may be read
        self._views: dict[tuple[int, ...], tuple] = {}
        self.addresses = 0, self._tables.data_ptr()

    def reserve(self, size: int) -> None:
        """Makes the buffer at least `size` int64 elements long."""
        if size > len(self._out):
            self._out = torch.empty(size, dtype=torch.int64)
            self.addresses = self._out.data_ptr(), self._tables.data_ptr()
            self._views.clear()

    def views(self, taken: Taken, num_reqs: int, num_seen: int) -> TakenTrees:
        """Returns views of the results.

        Args:
            num_seen: nodes per tree in the evidence; 0 if there is none.
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
    """Splits the library's output buffer into the tensors of `TakenTrees`, without the block tables."""
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
