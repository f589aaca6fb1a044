"""Drafted trees on the host by the C++ of `drafted.h`: which are believed, and which of their nodes are verified."""

from ctypes import CDLL, POINTER, Structure, byref, c_int64, c_void_p
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
    """What nodes are chosen by, and where it is left."""

    _fields_ = [
        *((name, c_int64) for name in ("num_reqs", "num_nodes", "max_depth")),
        *((name, c_void_p) for name in ("kinds", "useful", "forced", "table")),
        ("num_bins", c_int64),
        *((name, c_void_p) for name in ("edges", "price", "log_probs", "real", "kept", "path")),
    ]


class Layout(Structure):
    """Trees that become rows, and where those are left."""

    _fields_ = [
        *((name, c_int64) for name in ("num_reqs", "num_nodes")),
        *((name, c_void_p) for name in ("slots", "depths", "num_valid", "committed_lens", "last_token_ids")),
        ("block_tables", c_void_p),
        *((name, c_int64) for name in ("num_blocks", "block_size", "last_position")),
        *((name, c_void_p) for name in ("token_ids", "roots", "positions", "mapping", "rows")),
        *((name, c_void_p) for name in ("nodes", "row_ids", "row_positions", "row_mapping", "starts")),
    ]


TreeFields = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Token ids, parents, depths, scores [num_reqs, num_nodes] and the number of valid nodes [num_reqs]."""


class Sent(NamedTuple):
    """A reply as it lies, by slot; contiguous, on the host, int64 but for the scores."""

    trees: TreeFields
    epochs: Tensor
    committed_lens: Tensor


class Present(NamedTuple):
    """Where the sequences of all slots are: int64 [num_slots or more]."""

    epochs: Tensor
    committed_lens: Tensor
    last_token_ids: Tensor


class Prices(NamedTuple):
    """What nodes are chosen by."""

    table: Tensor
    """float64 [2, num_bins], contiguous: acceptance by bin of the confidence, of greedy and of sampled requests."""
    edges: Tensor
    """float64 [num_bins - 1], ascending."""
    tokens: Tensor | None
    """float64 [num_reqs * num_nodes or more], contiguous: of a pass with so many drafted nodes; None takes all."""


class Chosen(NamedTuple):
    """What is left of trees [num_reqs, num_nodes], and by what."""

    trees: TreeFields
    """[num_reqs, width]: of the kept nodes alone."""
    log_probs: Tensor
    """float32 [num_reqs, num_nodes], given the parent."""
    real: Tensor
    """bool, likewise: drafted nodes that count."""
    kept: Tensor
    """bool, likewise: those to verify."""


class LaidOut(NamedTuple):
    """Where the nodes of trees lie; all int64, [num_reqs, num_nodes] where it says nothing else."""

    roots: Tensor
    """[num_reqs]: positions."""
    positions: Tensor
    mapping: Tensor
    """Address in the pool; 0 for padding."""
    rows: Tensor
    """Row of each node; any row for padding."""
    starts: Tensor
    """[num_reqs + 1]: first row of each tree."""
    nodes: Tensor
    """[num_rows]: index of each row among the nodes, and by row the columns before."""
    row_ids: Tensor
    row_positions: Tensor
    row_mapping: Tensor


class DraftIntake:
    """Takes trees in; every tensor is contiguous and on the host.

    Args:
        library: of `wingbeat.kernels.cpu.library`.
    """

    def __init__(self, library: CDLL) -> None:
        library.wingbeat_check_trees.argtypes = [POINTER(Answer), POINTER(TreeColumns)]
        library.wingbeat_choose_nodes.argtypes = [POINTER(Choice), POINTER(TreeColumns), POINTER(TreeColumns)]
        library.wingbeat_lay_out.argtypes, library.wingbeat_lay_out.restype = [POINTER(Layout)], c_int64
        self._lay_out = library.wingbeat_lay_out
        library.wingbeat_check_trees.restype = library.wingbeat_choose_nodes.restype = c_int64
        self._check, self._choose = library.wingbeat_check_trees, library.wingbeat_choose_nodes

    def check(
        self, slots: Tensor, wanted: Tensor, sent: Sent, present: Present, vocab_size: int, *, chains: bool
    ) -> TreeFields | None:
        """One tree per decode, a bare root where what was sent does not count; None where nothing does.

        Args:
            slots: int64 [num_reqs].
            wanted: bool [num_reqs]: a tree was asked for.
            chains: each node must follow the one before it.
        """
        num_reqs, num_nodes = len(slots), sent.trees[0].shape[1]
        into = _room(num_reqs, num_nodes)
        answer = Answer(
            num_reqs,
            num_nodes,
            slots.data_ptr(),
            wanted.data_ptr(),
            TreeColumns.of(sent.trees),
            sent.epochs.data_ptr(),
            sent.committed_lens.data_ptr(),
            *(column.data_ptr() for column in present),
            vocab_size,
            chains,
        )
        width = self._check(byref(answer), byref(TreeColumns.of(into)))
        return None if not width else _narrowed(into, width)

    def choose(
        self,
        trees: TreeFields,
        kinds: Tensor,
        useful: Tensor,
        forced: Tensor | None,
        prices: Prices,
        max_depth: int,
    ) -> Chosen:
        """The nodes of all trees together that are worth verifying.

        Args:
            kinds: int64 [num_reqs]: row of the table.
            useful: int64 [num_reqs]: levels that could still be emitted.
            forced: bool [num_reqs]: all of whose useful nodes stay.
            max_depth: of nodes that count.
        """
        trees = tuple(field.contiguous() for field in trees)
        num_reqs, num_nodes = trees[0].shape
        into, shape = _room(num_reqs, num_nodes), (num_reqs, num_nodes)
        log_probs, path = torch.empty(shape), torch.empty(shape, dtype=torch.float64)
        real, kept = torch.empty(2, *shape, dtype=torch.bool)
        choice = Choice(
            num_reqs,
            num_nodes,
            max_depth,
            *map(_address, (kinds, useful, forced, prices.table)),
            prices.table.shape[1],
            *map(_address, (prices.edges, prices.tokens, log_probs, real, kept, path)),
        )
        width = self._choose(byref(choice), byref(TreeColumns.of(trees)), byref(TreeColumns.of(into)))
        shown = [field.view(-1)[: num_reqs * width].view(num_reqs, width) for field in into[:4]]
        return Chosen((*shown, into[4]), log_probs, real, kept)

    def lay_out(
        self,
        slots: Tensor,
        trees: TreeFields,
        present: Present,
        block_tables: Tensor,
        block_size: int,
        last_position: int,
    ) -> LaidOut:
        """Where the nodes of trees lie in a round; their roots are filled in.

        Args:
            slots: int64 [num_reqs].
            block_tables: int64 [num_slots, num_blocks].
            last_position: that the model has.
        """
        token_ids, _, depths, _, num_valid = trees
        num_reqs, num_nodes = token_ids.shape
        depths, num_valid = depths.contiguous(), num_valid.contiguous()
        padded = torch.empty(3, num_reqs, num_nodes, dtype=torch.int64)
        flat = torch.empty(4, num_reqs * num_nodes, dtype=torch.int64)
        roots, starts = slots.new_empty(num_reqs), slots.new_empty(num_reqs + 1)
        read = (slots, depths, num_valid, present.committed_lens, present.last_token_ids, block_tables)
        layout = Layout(
            num_reqs,
            num_nodes,
            *(part.data_ptr() for part in read),
            block_tables.shape[1],
            block_size,
            last_position,
            token_ids.data_ptr(),
            roots.data_ptr(),
            *(part.data_ptr() for part in (*padded, *flat)),
            starts.data_ptr(),
        )
        count = self._lay_out(byref(layout))
        return LaidOut(roots, *padded, starts, *flat[:, :count])


def _room(num_reqs: int, num_nodes: int) -> TreeFields:
    ids = torch.empty(3, num_reqs, num_nodes, dtype=torch.int64)
    return (*ids.unbind(), torch.empty(num_reqs, num_nodes), torch.empty(num_reqs, dtype=torch.int64))


def _narrowed(trees: TreeFields, width: int) -> TreeFields:
    return (*(field[:, :width] for field in trees[:4]), trees[4])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
