"""Paths that a target chooses along trees on the host, by the C++ of `accept.h`."""

from collections.abc import Iterable
from ctypes import CDLL, POINTER, Structure, byref, c_int64, c_void_p, cast
from typing import NamedTuple

from torch import Tensor

MOST_KEPT = 256
"""Shapes of paths that room is kept for."""


class Forced(Structure):
    """Acceptance by decree; all null where the target decides."""

    _fields_ = [("limits", c_void_p), ("max_depth", c_int64), ("epochs", c_void_p), ("roots", c_void_p)]


class VerifiedTrees(Structure):
    """Trees of one round, and the target's choices."""

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
    """Where the accepted paths are left."""

    _fields_ = [
        ("longest", c_int64),
        ("width", c_int64),
        *(
            (name, c_void_p)
            for name in ("nodes", "token_ids", "num_tokens", "taps", "committed_lens", "last_token_ids")
        ),
    ]


class Pools(Structure):
    """Keys and values that follow the paths; all null where they stay."""

    _fields_ = [
        ("count", c_int64),
        *((name, c_void_p) for name in ("data", "row_bytes", "tables")),
        ("table_width", c_int64),
        ("block_size", c_int64),
    ]


class Compacted(NamedTuple):
    """What accepted nodes' keys and values are moved in, to the places of their tokens."""

    pools: list[Tensor]
    """Each [num_blocks, block_size, ...], contiguous, of any dtype."""
    block_tables: Tensor
    """int64 [num_slots, width], contiguous."""


class Decree(NamedTuple):
    """How much of each tree is accepted whatever the target chooses, along first children; for benchmarks."""

    limits: Tensor
    """int32 [max_depth]: a level is accepted where its random bits are below."""
    epochs: Tensor
    """[num_slots]"""
    roots: Tensor
    """[num_reqs]: positions."""


class Accepted(NamedTuple):
    """Paths of a round's trees; but for the taps, until the call after the next."""

    nodes: Tensor
    """int64 [num_reqs, longest]: root and accepted nodes, the last one repeated."""
    token_ids: Tensor
    """int64 [num_reqs, width]: the target's choices along the path; the rest is zero."""
    num_tokens: Tensor
    """int64 [num_reqs]"""
    taps: Tensor | None
    """[num_reqs, longest, taps_size] along the path."""
    moved: bool
    """Whether an accepted node lies elsewhere than its place in the sequence."""


class TreeAcceptance:
    """Walks trees where they lie; every tensor is contiguous, on the host, and int64 unless it says otherwise.

    Args:
        library: of `wingbeat.kernels.cpu.library`.
        committed_lens: [num_slots], which go on by each path; `last_token_ids` likewise become its last token.
        compacted: where accepted nodes' keys and values are moved; None leaves them where they are.
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
        """Follow the target's choices from each root; of equal children the first one is taken.

        Args:
            slots: [num_reqs], each another one.
            token_ids: [num_reqs, num_nodes]; `parents` likewise, each below its node's own number; None of bare roots.
            num_valid: [num_reqs]: nodes that count; the root always does. None likewise.
            targets: [num_rows]: the token that the target chooses after each row; or the logits that its best one is
                chosen by, float32 [num_rows, vocab_size], of which only rows along the paths are looked at.
            rows: [num_reqs, num_nodes]: row of each node; None where nodes follow one another.
            taps: [num_rows or more, taps_size], of any dtype.
            longest: most tokens of a path; `width`, no less, columns of its tokens.
            decree: in place of the target's choice, for benchmarks.
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
        """For the paths of so many requests, of so many nodes and columns."""
        self._rooms.reverse()  # a round is settled before the one after the next is decided
        rooms = self._rooms[0]
        if shape not in rooms:
            if len(rooms) >= MOST_KEPT:
                rooms.clear()
            rooms[shape] = _Room(*shape, self._committed_lens, self._last_token_ids)
        return rooms[shape]


class _Room:
    """Where paths of one shape are left, and at last the ends of their sequences."""

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
