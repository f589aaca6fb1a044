"""Bookkeeping of the blocks of layers with sliding windows; no tensors.

Block tables, block hashes and the prefix cache are those of the other layers. A block of such a table holds whole
contexts in the other layers; in layers with windows the block has memory, a *place*, only while a window reaches the
block, and afterwards until other blocks need the place. A prefix can be reused as far as the blocks before its end that
the next position's window reaches still have places.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from wingbeat.runtime.kv.blocks import IntegrityError

NO_PLACE = 0
"""Place of blocks without memory: the null block, into which padding rows write."""


class WindowBlocks:
    """Places by block id. A place is free, held, or idle: idle places keep their contents until they are taken.

    Args:
        num_blocks: number of blocks of the tables, with the null block.
        num_places: number of places, with `NO_PLACE`.
        num_reached: number of blocks before a position at the start of a block that the position's window reaches.
        num_spare: number of windows, besides those of running sequences, for which there are places.
    """

    def __init__(self, num_blocks: int, num_places: int, num_reached: int, num_spare: int) -> None:
        self.num_places = num_places
        self.num_reached = num_reached
        self.num_rows = num_spare
        self.places = [NO_PLACE] * num_blocks
        self.changed: dict[int, int] = {}
        """Places that were given or taken since the device's tables were written, by block id."""
        self._holds = [0] * num_blocks
        self._free = list(range(num_places - 1, NO_PLACE, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks with idle places; the place of the first block is taken first."""
        self.hollow: set[int] = set()
        """Blocks whose contents a replay is recomputing; other requests must not use their places yet."""
        self._asked: set[int] = set()
        """Blocks of windows that a request needed but found without places. Their places are taken last, so that the
        next request with the same prefix finds them."""
        self._pins: Counter[bytes] = Counter()

    @property
    def num_pinned(self) -> int:
        """Number of pinned prefixes."""
        return len(self._pins)

    @property
    def most_pinned(self) -> int:
        """Maximum number of pinned prefixes."""
        return self.num_rows // 2

    @property
    def num_held(self) -> int:
        """Number of places that cannot be taken."""
        return self.num_places - 1 - len(self._free) - len(self._idle)

    def has(self, blocks: Iterable[int]) -> bool:
        """Whether every block has a place with its contents."""
        return all(map(self._has, blocks))

    def hold(self, blocks: Sequence[int]) -> None:
        """Holds the blocks' places; blocks without a place get one, with arbitrary contents.

        Raises:
            IntegrityError: all places are held.
        """
        for block_id in blocks:
            self._holds[block_id] += 1
            self._idle.pop(block_id, None)
        for block_id in blocks:
            if self.places[block_id] == NO_PLACE:
                self._give(block_id)

    def hold_for_replay(self, blocks: Sequence[int]) -> None:
        """Holds the blocks' places; the replay writes the contents of blocks that have none.

        Raises:
            IntegrityError: all places are held.
        """
        self.hollow.update(block_id for block_id in blocks if not self._has(block_id))
        self.hold(blocks)

    def filled(self, blocks: Iterable[int]) -> None:
        """Records that a replay has written all positions of blocks."""
        for block_id in self.hollow.intersection(blocks):
            self.hollow.remove(block_id)
            self.changed[block_id] = self.places[block_id]

    def let_go(self, blocks: Sequence[int], soon: bool) -> None:
        """Ends a hold; places without holds become idle, or free if their contents are incomplete.

        Args:
            soon: whether the places are taken before all other idle places, unless they are asked for.
        """
        for block_id in blocks:
            self._holds[block_id] -= 1
            if self._holds[block_id] == 0:
                self._idle[block_id] = None
                if block_id in self.hollow:
                    self._free_place(block_id)
                elif soon and block_id not in self._asked:
                    self._idle.move_to_end(block_id, last=False)

    def reached(self, blocks: Sequence[int]) -> Sequence[int]:
        """Returns those blocks of a prefix that the window of the next position reaches."""
        return blocks[max(len(blocks) - self.num_reached, 0) :]

    def fill(self, blocks: Sequence[int]) -> bool:
        """Gives places to blocks that are about to be written and cached; returns False if too few places are left."""
        if len(blocks) > len(self._free) + len(self._idle):
            return False
        self.hold(blocks)
        self.let_go(blocks, soon=False)
        return True

    def num_usable(self, blocks: Sequence[int], hashes: Sequence[bytes | None]) -> int:
        """See `KeptBeside.num_usable`; remembers a window that is missing at the end of the prefix."""
        count = len(blocks)
        while count:
            first = max(count - self.num_reached, 0)
            missing = next((index for index in range(count - 1, first - 1, -1) if not self._has(blocks[index])), None)
            if missing is None:
                break
            count = missing
        if count < len(blocks):
            self._asked.update(self.reached(blocks))
        return count

    def is_better(self, block_id: int, cached_id: int) -> bool:
        """See `KeptBeside.is_better`; a block with a place is better than a block without one."""
        better = self._has(block_id) and not self._has(cached_id)
        if better and cached_id in self._asked:
            self._asked.add(block_id)
            if block_id in self._idle:
                self._idle.move_to_end(block_id)
        return better

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Does nothing: places belong to blocks, not to hashes."""

    def discard(self, block_id: int) -> None:
        """Frees the place of a block that is free and not cached."""
        self._asked.discard(block_id)
        if self.places[block_id] != NO_PLACE:
            self._free_place(block_id)

    def dropped(self, block_hash: bytes) -> None:
        """Does nothing: `discard` follows."""

    def pin(self, blocks: Sequence[int], block_hash: bytes) -> None:
        """See `KeptBeside.pin`; holds the last window of the prefix."""
        if not self.has(self.reached(blocks)):
            raise KeyError("layers with sliding windows no longer keep the end of the prefix")
        self.hold(self.reached(blocks))
        self._pins[block_hash] += 1

    def unpin(self, blocks: Sequence[int], block_hash: bytes) -> None:
        """See `KeptBeside.unpin`."""
        self.let_go(self.reached(blocks), soon=False)
        self._pins -= Counter([block_hash])

    def clear(self) -> None:
        """Frees all idle places."""
        for block_id in list(self._idle):
            self.discard(block_id)
        self._asked.clear()

    def mismatch(self, cached: dict[bytes, int]) -> str | None:
        """Returns the first inconsistency; None if there is none."""
        given = [place for place in self.places if place != NO_PLACE]
        if sorted([*given, *self._free]) != list(range(1, self.num_places)):
            return f"{len(given)} places are given and {len(self._free)} are free, of {self.num_places - 1}"
        for block_id, place in enumerate(self.places):
            is_idle = place != NO_PLACE and not self._holds[block_id]
            if is_idle != (block_id in self._idle):
                return f"block {block_id} has place {place} and {self._holds[block_id]} holds"
        return None

    def _has(self, block_id: int) -> bool:
        return self.places[block_id] != NO_PLACE and block_id not in self.hollow

    def _free_place(self, block_id: int) -> None:
        del self._idle[block_id]
        self.hollow.discard(block_id)
        self._free.append(self._take(block_id))

    def _give(self, block_id: int) -> None:
        if not (self._free or self._idle):
            raise IntegrityError(f"all {self.num_places - 1} blocks of layers with sliding windows are held")
        place = self._free.pop() if self._free else self._take(self._idle.popitem(last=False)[0])
        self.places[block_id] = self.changed[block_id] = place

    def _take(self, block_id: int) -> int:
        place, self.places[block_id] = self.places[block_id], NO_PLACE
        self.changed[block_id] = NO_PLACE
        return place
