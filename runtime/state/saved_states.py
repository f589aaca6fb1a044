"""Bookkeeping of saved recurrent states by prefix; no tensors.

A KV block is useful for every prefix that contains it, but a state belongs to exactly one prefix. States are therefore
saved at the ends of some blocks, under the hashes of these blocks, and a state is dropped together with its block.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence


class SavedStates:
    """Rows that hold states: free, pending (of a live block that is not hashed yet), cached, or lent.

    Args:
        num_rows: maximum number of states; beyond that, the least recently used cached state is evicted.
        interval: tokens between prefixes whose states are saved; a multiple of the block size.
        enabled: False saves no states; rows can still be lent.

    Raises:
        ValueError: num_rows is 0, or the interval is not a multiple of the block size.
    """

    def __init__(self, num_rows: int, interval: int, block_size: int, enabled: bool = True) -> None:
        if num_rows < 1:
            raise ValueError(f"num_saved_states is {num_rows}: use at least 1")
        if interval < 1 or interval % block_size:
            raise ValueError(f"state_interval is {interval}: use a multiple of block_size, {block_size}")
        self.num_rows = num_rows
        self.interval = interval
        self.enabled = enabled
        self._free = list(reversed(range(num_rows)))
        self._pending: dict[int, int] = {}
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        """By block hash, the number of pinned prefixes that end at the block."""
        self._num_lent = 0

    @property
    def num_cached(self) -> int:
        """Number of prefixes whose states are saved and can be found."""
        return len(self._cached)

    @property
    def num_pinned(self) -> int:
        """Number of states that are pinned and cannot be evicted."""
        return len(self._pins)

    @property
    def most_pinned(self) -> int:
        """Maximum number of pinned states: half of the rows.

        The other half is for running sequences and for replays.
        """
        return self.num_rows // 2

    def next_end(self, position: int, end: int) -> int | None:
        """Returns the first prefix length in (position, end] at which the state is saved; None if there is none."""
        following = (position // self.interval + 1) * self.interval
        return following if self.enabled and following <= end else None

    def allocate_row(self, block_id: int) -> int | None:
        """Reserves a row in which to save the state at the end of a live block, and returns the row's index.

        Takes the row that is already pending for this block; else a free row; else the row of a cached state that can
        be evicted; else the row of the oldest pending state, which is dropped (usually the state of an earlier block of
        the same prompt). Returns None if all rows are lent or pinned. The caller must write rows in the order in which
        it took them.
        """
        row = self._pending.pop(block_id, None)
        if row is None:
            row = self._take()
        if row is None and self._pending:
            row = self._pending.pop(next(iter(self._pending)))
        if row is not None:
            self._pending[block_id] = row
        return row

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Makes the pending state of a block findable under the block's hash; the block is full and computed."""
        row = self._pending.pop(block_id, None)
        if row is None:
            return
        if block_hash in self._cached:
            self._free.append(row)
        else:
            self._cached[block_hash] = row

    def discard(self, block_id: int) -> None:
        """Drops the pending state of a block that is released before it is full."""
        row = self._pending.pop(block_id, None)
        if row is not None:
            self._free.append(row)

    def dropped(self, block_hash: bytes) -> None:
        """Drops the state of a prefix whose block is no longer cached."""
        row = self._cached.pop(block_hash, None)
        if row is not None:
            self._free.append(row)

    def num_usable(self, blocks: Sequence[int], hashes: Sequence[bytes | None]) -> int:
        """Returns the number of blocks up to the last block after which the state is saved."""
        count = len(hashes)
        while count and hashes[count - 1] not in self._cached:
            count -= 1
        return count

    def is_better(self, block_id: int, cached_id: int) -> bool:
        """Returns False, because states belong to hashes."""
        return False

    def find(self, block_hash: bytes) -> int:
        """Returns the row of a cached state, and marks it as most recently used.

        Raises:
            KeyError: the state is not cached.
        """
        self._cached.move_to_end(block_hash)
        return self._cached[block_hash]

    def pin(self, blocks: Sequence[int], block_hash: bytes) -> None:
        """Protects a cached state from eviction.

        Raises:
            KeyError: the state is not cached.
        """
        self.find(block_hash)
        self._pins[block_hash] += 1

    def unpin(self, blocks: Sequence[int], block_hash: bytes) -> None:
        """Ends the protection by `pin`."""
        self._pins -= Counter([block_hash])

    def lend(self) -> int | None:
        """Lends a row to a caller, such as a drafter's replay; returns None if all rows are in use."""
        row = self._take()
        self._num_lent += row is not None
        return row

    def give_back(self, row: int) -> None:
        """Takes a lent row back."""
        self._num_lent -= 1
        self._free.append(row)

    def clear(self) -> None:
        """Drops every cached state that is not pinned."""
        for block_hash in [block_hash for block_hash in self._cached if block_hash not in self._pins]:
            self._free.append(self._cached.pop(block_hash))

    def mismatch(self, cached: dict[bytes, int]) -> str | None:
        """Returns a description of the first inconsistency; None if there is none.

        Args:
            cached: block ids by hash, from the cache of KV blocks.
        """
        if len(self._free) + len(self._pending) + len(self._cached) + self._num_lent != self.num_rows:
            return (
                f"of {self.num_rows} rows of states {len(self._free)} are free, {len(self._pending)} pending, "
                f"{len(self._cached)} cached and {self._num_lent} lent"
            )
        if not self._cached.keys() <= cached.keys():
            return "a state is cached under the hash of a block that is not"
        if not self._pins.keys() <= self._cached.keys():
            return "a state is pinned that is not cached"
        return None

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((block_hash for block_hash in self._cached if block_hash not in self._pins), None)
        return None if oldest is None else self._cached.pop(oldest)
