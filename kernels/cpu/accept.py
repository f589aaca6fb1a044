"""Accepts the target's paths along draft trees on the host, in C++ (`accept.h`)."""

from collections.abc import Iterable
from ctypes import CDLL, POINTER, Structure, byref, c_int64, c_void_p, cast
from typing import NamedTuple

from torch import Tensor

MOST_KEPT = 256
"""Maximum number of path shapes whose result buffers are kept."""


class Forced(Structure):
    """Parameters of forced acceptance. All pointers are null if the target's choices determine the accepted paths."""

    _fields_ = [("limits", c_void_p), ("max_depth", c_int64), ("epochs", c_void_p), ("roots", c_void_p)]


class VerifiedTrees(Structure):
    """Draft trees of one round, and the target's choices after each of their rows."""

    _fields_ = [
        ("num_reqs", c_int64),
        ("num_nodes", c_int64),
        *((name, c_void_p) for name in ("token_ids", "parents", "num_valid", "rows", "targets", "logits")),
        ("vocab", c_int64),
        ("taps", c_void_p),
        ("tap_bytes", c_int64),
        ("slots", c_void_p),
        ("forced", Forced),
    ]


class Paths(Structure):
    """Buffers for the accepted paths."""

    _fields_ = [
        ("longest", c_int64),
        ("width", c_int64),
        *(
            (name, c_void_p)
            for name in ("nodes", "token_ids", "num_tokens", "taps", "committed_lens", "last_token_ids")
        ),
    ]


class Pools(Structure):
    """KV pools whose rows are moved along accepted paths; all null if no rows are moved."""

    _fields_ = [
        ("count", c_int64),
        *((name, c_void_p) for name in ("data", "row_bytes", "tables")),
        ("table_width", c_int64),
        ("block_size", c_int64),
    ]


class Compacted(NamedTuple):
    """KV pools and block tables in which accepted nodes are moved to the positions of their tokens."""

    pools: list[Tensor]
    """Each [num_blocks, block_size, ...], contiguous, of any dtype."""
    block_tables: Tensor
    """int64 [num_slots, width], contiguous."""


class Decree(NamedTuple):
    """Forced acceptance, for benchmarks.

    A random number of levels is accepted along first children, regardless of the target's choices.
    """

    limits: Tensor
    """int32 [max_depth]: a level is accepted if its random bits are below its limit."""
    epochs: Tensor
    """[num_slots]: epochs, which seed the random bits."""
    roots: Tensor
    """[num_reqs]: positions of the roots."""


class Accepted(NamedTuple):
    """Accepted paths of a round's trees. All tensors but `taps` are overwritten by the call after the next."""

    nodes: Tensor
    """int64 [num_reqs, longest]: the root and the accepted nodes; the last node is repeated."""
    token_ids: Tensor
    """int64 [num_reqs, width]: the target's choices along the path, then zeros."""
    num_tokens: Tensor
    """int64 [num_reqs]: number of the target's choices on each path."""
    taps: Tensor | None
    """[num_reqs, longest, taps_size]: taps of the nodes in `nodes`."""
    moved: bool
    """True if the keys and values of an accepted node are stored elsewhere than at the node's final position."""


class TreeAcceptance:
    """Accepts paths along draft trees. All tensors are contiguous, on the host, and int64 unless stated otherwise.

    Args:
        library: from `wingbeat.kernels.cpu.library`.
        committed_lens: [num_slots], advanced by the length of each path; `last_token_ids` receives each path's last
            token.
        compacted: KV pools in which accepted nodes are moved; None leaves keys and values in place.
    """

    def __init__(
        self, library: CDLL, committed_lens: Tensor, last_token_ids: Tensor, compacted: Compacted | None = None
    ) -> None:
        library.wingbeat_accept.argtypes = [POINTER(VerifiedTrees), POINTER(Paths), POINTER(Pools)]
        library.wingbeat_accept.restype = c_int64
        self._accept = library.wingbeat_accept
        self._committed_lens, self._last_token_ids = committed_lens, last_token_ids
        self._compacted = compacted
        self._pools = Pools() if compacted is None else _pools(compacted)
        self._trees = VerifiedTrees()
        self._rooms: list[dict[tuple[int, ...], _Room]] = [{}, {}]

    def accept(
        self,
        slots: Tensor,
        token_ids: Tensor,
        parents: Tensor | None,
        num_valid: Tensor | None,
        targets: Tensor,
        rows: Tensor | None,
        taps: Tensor | None,
        *,
        longest: int,
        width: int,
        decree: Decree | None = None,
    ) -> Accepted:
        """Follows the target's choices from each root. If several children carry the chosen token, the first is taken.

        Args:
            slots: [num_reqs], all different.
            token_ids: [num_reqs, num_nodes]; `parents` likewise, each less than its node's number. `parents` is None
                for bare roots.
            num_valid: [num_reqs]: number of valid nodes of each tree; the root is always valid. None for bare roots.
            targets: [num_rows] tokens that the target chooses after each row; or float32 logits [num_rows, vocab_size],
                whose maximum is chosen. Only rows along the paths are read.
            rows: [num_reqs, num_nodes]: row of each node in `targets` and `taps`; None if nodes are stored
                consecutively.
            taps: [num_rows or more, taps_size], of any dtype.
            longest: maximum number of nodes of a path; `width`, at least `longest`, is the number of columns for a
                path's tokens.
            decree: forces the number of accepted levels, for benchmarks.
        """
        (num_reqs, num_nodes), vocab = token_ids.shape, targets.shape[1] if targets.dim() == 2 else 0
        room, trees, forced = self._room(num_reqs, longest, width), self._trees, Forced()
        read = (slots, token_ids, parents, num_valid, rows, targets, taps)
        held = [None if part is None else part.contiguous() for part in read]
        trees.num_reqs, trees.num_nodes, trees.vocab = num_reqs, num_nodes, vocab
        trees.slots, trees.token_ids, trees.parents, trees.num_valid, trees.rows, chosen, trees.taps = _addresses(held)
        trees.targets, trees.logits = (None, chosen) if vocab else (chosen, None)
        if decree is not None:
            limits, epochs, roots = (part.contiguous() for part in decree)
            forced = Forced(limits.data_ptr(), len(limits), epochs.data_ptr(), roots.data_ptr())
            held += [limits, epochs, roots]
        trees.forced, path_taps = forced, None
        if taps is not None:
            path_taps = taps.new_empty(num_reqs, longest, taps.shape[1])
            trees.tap_bytes = taps.shape[1] * taps.element_size()
        room.paths.taps = _address(path_taps)
        moved = self._accept(byref(trees), byref(room.paths), byref(self._pools))
        return Accepted(room.nodes, room.token_ids, room.num_tokens, path_taps, moved != 0)

    def _room(self, *shape: int) -> "_Room":
        """Result buffers for paths of a shape (num_reqs, longest, width)."""
        self._rooms.reverse()  # two sets suffice, because round n is settled before round n + 2 is accepted
        rooms = self._rooms[0]
        if shape not in rooms:
            if len(rooms) >= MOST_KEPT:
                rooms.clear()
            rooms[shape] = _Room(*shape, self._committed_lens, self._last_token_ids)
        return rooms[shape]


class _Room:
    """Result buffers for paths of one shape, with the per-slot columns that accepting a path updates."""

    def __init__(self, num_reqs: int, longest: int, width: int, committed_lens: Tensor, last_token_ids: Tensor) -> None:
        new = committed_lens.new_empty
        self.nodes, self.token_ids, self.num_tokens = new(num_reqs, longest), new(num_reqs, width), new(num_reqs)
        written = (self.nodes, self.token_ids, self.num_tokens, None, committed_lens, last_token_ids)
        self.paths = Paths(longest, width, *_addresses(written))


def _pools(compacted: Compacted) -> Pools:
    pools, (_, width) = compacted.pools, compacted.block_tables.shape
    data = (c_void_p * len(pools))(*(pool.data_ptr() for pool in pools))
    row_bytes = (c_int64 * len(pools))(*(pool[0, 0].numel() * pool.element_size() for pool in pools))
    address = compacted.block_tables.data_ptr()
    made = Pools(len(pools), cast(data, c_void_p), cast(row_bytes, c_void_p), address, width, pools[0].shape[1])
    made.held = (data, row_bytes)
    return made


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(tensors: Iterable[Tensor | None]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
