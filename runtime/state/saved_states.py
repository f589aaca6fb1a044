"""Which states of recurrent layers are kept, of which prefix; bookkeeping only, no tensors.

A block of keys and values is of use at any prefix's end; a state is that of one prefix alone. So states are kept at the
ends of some blocks, under the same hashes, and leave with their block.
"""

from collections import Counter, OrderedDict


class SavedStates:
    """Rows that hold states: free, pending (of a live block that is not hashed yet), cached, or lent.

    Args:
        num_rows: at most so many at once; the least recently used cached one makes room.
        interval: tokens between two prefixes whose states are kept, whole blocks.
        enabled: False keeps none; rows are lent all the same.

    Raises:
        ValueError: there is no row, or the interval is no number of blocks.
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
        """By hash, how many pinned prefixes end there."""
        self._num_lent = 0

    @property
    def num_cached(self) -> int:
        """Prefixes whose states can be found."""
        return len(self._cached)

    @property
    def num_pinned(self) -> int:
        """States that are never given up for another."""
        return len(self._pins)

    @property
    def most_pinned(self) -> int:
        """So many may be pinned: running sequences and drafters' replays have the other half."""
        return self.num_rows // 2

    def next_end(self, position: int, end: int) -> int | None:
        """The first prefix length behind `position`, at most `end`, whose state is kept."""
        following = (position // self.interval + 1) * self.interval
        return following if self.enabled and following <= end else None

    def take(self, block_id: int) -> int | None:
        """A row for the state at the end of a live block; None where all are lent.

        Where nothing else makes room, the oldest pending one does: its block is an earlier one of this prompt, mostly.
        Rows must be written in the order in which they are taken.
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
        """A block is full and computed: its pending state, if it has one, can be found under its hash."""
        row = self._pending.pop(block_id, None)
        if row is None:
            return
        if block_hash in self._cached:
            self._free.append(row)
        else:
            self._cached[block_hash] = row

    def discard(self, block_id: int) -> None:
        """A block is let go of before it was full: its pending state is nobody's."""
        row = self._pending.pop(block_id, None)
        if row is not None:
            self._free.append(row)

    def dropped(self, block_hash: bytes) -> None:
        """A prefix is not cached any more."""
        row = self._cached.pop(block_hash, None)
        if row is not None:
            self._free.append(row)

    def has(self, block_hash: bytes | None) -> bool:
        """Whether the state behind a block is here."""
        return block_hash in self._cached

    def find(self, block_hash: bytes) -> int:
        """The row of a cached state, which is the most recently used one now.

        Raises:
            KeyError: it is not here.
        """
        self._cached.move_to_end(block_hash)
        return self._cached[block_hash]

    def pin(self, block_hash: bytes) -> None:
        """Keep a cached state from making room.

        Raises:
            KeyError: it is not here.
        """
        self.find(block_hash)
        self._pins[block_hash] += 1

    def unpin(self, block_hash: bytes) -> None:
        """The inverse."""
        self._pins -= Counter([block_hash])

    def lend(self) -> int | None:
        """A row for a caller's own use; None where all are in use."""
        row = self._take()
        self._num_lent += row is not None
        return row

    def give_back(self, row: int) -> None:
        """End the use of a row that was lent."""
        self._num_lent -= 1
        self._free.append(row)

    def clear(self) -> None:
        """Forget every cached state but the pinned ones."""
        for block_hash in [block_hash for block_hash in self._cached if block_hash not in self._pins]:
            self._free.append(self._cached.pop(block_hash))

    def mismatch(self, cached: dict[bytes, int]) -> str | None:
        """What does not add up; None where everything does.

        Args:
            cached: block by hash, of the blocks' own cache.
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
