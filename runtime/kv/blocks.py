"""Ownership and prefix cache of paged KV blocks; bookkeeping only, no tensors.

The same block ids index the verifier's and the drafter's KV, so one allocator serves both. A prefix that is cached here
is cached in the drafter too, up to the last position that the drafter has filled. Requests are not handled here:
callers keep the block tables.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from wingbeat.runtime.kv.block_hashes import ROOT_HASH, CacheLog, hash_block

RESERVED_BLOCK = 0
"""Id of the null block, which is never allocated, because padding rows write into it."""


class KeptBeside(Protocol):
    """Tensors such as recurrent states, kept for some prefixes in addition to keys and values.

    The tensors of a prefix are stored under the hash of the prefix's last block.
    """

    num_rows: int
    """Maximum number of prefixes whose tensors are kept at once."""
    num_pinned: int
    most_pinned: int

    def num_usable(self, blocks: Sequence[int], hashes: Sequence[bytes | None]) -> int:
        """Returns the length in blocks of the longest beginning of a cached prefix for which a tensor is kept.

        Args:
            hashes: hash of each block of the prefix.
        """
        ...

    def is_better(self, block_id: int, cached_id: int) -> bool:
        """Whether a computed block is to replace the cached block of the same prefix."""
        ...

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Stores the tensor that is pending for a block under the block's hash.

        Called once the block is full and computed.
        """
        ...

    def discard(self, block_id: int) -> None:
        """Drops the tensor that is kept or pending for a block, because the block is free and not cached."""
        ...

    def dropped(self, block_hash: bytes) -> None:
        """Drops the tensor of a prefix that is no longer cached."""
        ...

    def pin(self, blocks: Sequence[int], block_hash: bytes) -> None:
        """Protects a prefix's tensor from eviction; raises KeyError if no tensor is kept for the prefix.

        Args:
            block_hash: hash of the last block.
        """
        ...

    def unpin(self, blocks: Sequence[int], block_hash: bytes) -> None:
        """Ends the protection by `pin`."""
        ...

    def clear(self) -> None:
        """Drops all tensors that are not pinned."""
        ...

    def mismatch(self, cached: dict[bytes, int]) -> str | None:
        """Returns the first inconsistency with `cached`, the cached blocks by hash; None if there is none."""
        ...


class NoFreeBlocks(RuntimeError):
    """More blocks were requested than are free; no block was allocated."""


class IntegrityError(AssertionError):
    """The bookkeeping of blocks contradicts itself, or the block tables against which it was checked."""


class BlockManager:
    """Reference-counted blocks, a hash-chained prefix cache, and the drafter's fill level of each block.

    A block is reserved (block 0), live (referenced), free, or free and cached. A free cached block can still be
    acquired, until allocation runs out of free uncached blocks and evicts the least recently used cached block. A
    pinned block is a cached block that is live while it is pinned.

    Args:
        beside: tensors kept for prefixes, for models with layer state in addition to keys and values; only prefixes
            with such a tensor then match.

    Raises:
        ValueError: num_blocks is below 2, or block_size is below 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        beside: KeptBeside | None = None,
    ) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"num_blocks is {num_blocks}, block_size is {block_size}: must be at least 2 and 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.beside = beside
        self.log = CacheLog()
        self._start()

    def _start(self) -> None:
        num_blocks = self.num_blocks
        self.query_tokens = 0
        """Number of tokens of all prompts passed to `match_prefix`."""
        self.hit_tokens = 0
        """Number of prompt tokens found in the cache."""
        self._ref_counts = [0] * num_blocks
        # The list descends because blocks are popped from its end; a new pool is then allocated in ascending order.
        self._free = list(range(num_blocks - 1, RESERVED_BLOCK, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._pins: Counter[int] = Counter()
        """By block id, the number of pinned prefixes that contain the block."""
        self._draft_incarnations = [0] * num_blocks
        self._draft_filled = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return, including free cached blocks."""
        return len(self._free) + len(self._free_cached)

    @property
    def num_pinned(self) -> int:
        """Number of blocks of pinned prefixes; a block of several prefixes is counted once."""
        return len(self._pins)

    def figures(self) -> dict[str, int]:
        """Returns those fields of `EngineStats` that this class counts."""
        return {
            "num_blocks": self.num_blocks,
            "num_free_blocks": self.num_free,
            "num_pinned_blocks": self.num_pinned,
            "prefix_query_tokens": self.query_tokens,
            "prefix_hit_tokens": self.hit_tokens,
        }

    def match_prefix(self, token_ids: Sequence[int], root_hash: bytes = ROOT_HASH) -> list[int]:
        """Returns the cached blocks of a prompt's beginning, in order, and counts the query.

        Never matches the whole prompt: at least its last token is left to compute. The caller must `acquire` the blocks
        before the next `allocate`, which could evict them.

        Args:
            token_ids: the prompt.
            root_hash: parent hash of the first block, for sequences whose KV differs from that of other sequences with
                equal tokens (salt, adapter).
        """
        self.query_tokens += len(token_ids)
        matched = self.find(token_ids[: len(token_ids) - 1], root_hash)
        if self.beside is not None:
            del matched[self.beside.num_usable(matched, [self._hashes[block_id] for block_id in matched]) :]
        self.hit_tokens += len(matched) * self.block_size
        return matched

    def find(self, token_ids: Sequence[int], root_hash: bytes = ROOT_HASH) -> list[int]:
        """Returns the cached blocks of the beginning of `token_ids`, or of all tokens; does not count a query."""
        found: list[int] = []
        block_hash, size = root_hash, self.block_size
        for begin in range(0, len(token_ids) - size + 1, size) if self.enable_prefix_caching else ():
            block_hash = hash_block(block_hash, token_ids[begin : begin + size])
            block_id = self._cached.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def is_pinned(self, block_id: int) -> bool:
        """Whether a pinned prefix contains the block."""
        return block_id in self._pins

    def pin(self, blocks: Sequence[int]) -> None:
        """Protects a cached prefix: the prefix's blocks, and the state kept for its last block, are not evicted.

        Raises:
            IntegrityError: a block is not cached; nothing is pinned.
            KeyError: no state is kept for the last block; nothing is pinned.
        """
        lost = [block_id for block_id in blocks if not self._is_cached(block_id)]
        _require(not lost, f"blocks {lost} are to be pinned, but not cached")
        if self.beside is not None:
            self.beside.pin(blocks, self._hashes[blocks[-1]])
        self.acquire(blocks)
        self._pins.update(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Makes a prefix evictable again, except for blocks that other pinned prefixes contain.

        Raises:
            IntegrityError: a block is not pinned; no block is unpinned.
        """
        loose = [block_id for block_id in blocks if block_id not in self._pins]
        _require(not loose, f"blocks {loose} are to be unpinned, but not pinned")
        if self.beside is not None:
            self.beside.unpin(blocks, self._hashes[blocks[-1]])
        self._pins -= Counter(blocks)
        self.release(blocks)

    def allocate(self, num: int) -> list[int]:
        """Returns `num` blocks with one reference each; the blocks' former content is dropped.

        Raises:
            NoFreeBlocks: fewer than `num` blocks are free.
        """
        if num > self.num_free:
            raise NoFreeBlocks(f"{num} blocks wanted, {self.num_free} of {self.num_blocks - 1} are free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num)]
        for block_id in blocks:
            self._ref_counts[block_id] = 1
            self._hashes[block_id] = None
            self._draft_filled[block_id] = 0
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds one reference to blocks that are live or cached.

        Raises:
            IntegrityError: a block is neither live nor cached, so its content may be lost.
        """
        for block_id in blocks:
            if self._ref_counts[block_id] == 0:
                if block_id not in self._free_cached:
                    raise IntegrityError(f"block {block_id} acquired, but it is neither live nor cached")
                del self._free_cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each block of a table; blocks without references become free.

        Blocks are freed from the last to the first, so that the first blocks are evicted last. A prefix is useful
        without its continuation, but a continuation is useless without its prefix.

        Raises:
            IntegrityError: a block is not live.
        """
        for block_id in reversed(blocks):
            if self._ref_counts[block_id] == 0:
                raise IntegrityError(f"block {block_id} released, but it is not live")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id]:
                continue
            if self._is_cached(block_id):
                self._free_cached[block_id] = None
            else:
                self._add_free(block_id)

    def register(self, block_id: int, parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
        """Adds a full, computed, live block to the prefix cache and returns its hash.

        If another block already holds the same prefix, that other block stays in the cache, unless the state kept
        beside blocks makes the new block better. Without prefix caching, no block is cached and the parent's hash is
        returned.

        Args:
            block_id: a live block.
            parent_hash: result of registering the previous block; `ROOT_HASH` for the first block.
            token_ids: the block's block_size tokens.

        Raises:
            ValueError: the block is not full.
            IntegrityError: the block is not live, or is registered with other content.
        """
        if not self.enable_prefix_caching:
            return parent_hash
        if len(token_ids) != self.block_size:
            raise ValueError(f"block {block_id} registered with {len(token_ids)} tokens, it holds {self.block_size}")
        block_hash = hash_block(parent_hash, token_ids)
        if self._ref_counts[block_id] == 0:
            raise IntegrityError(f"block {block_id} registered, but it is not live")
        if self._hashes[block_id] not in (None, block_hash):
            raise IntegrityError(f"block {block_id} registered twice with different content")
        self._hashes[block_id] = block_hash
        cached_id = self._cached.get(block_hash)
        if cached_id is None:
            self._cached[block_hash] = block_id
            self.log.cached(block_hash)
        elif self.beside is not None and cached_id not in self._pins and self.beside.is_better(block_id, cached_id):
            self._cached[block_hash] = block_id
            if self._ref_counts[cached_id] == 0:
                del self._free_cached[cached_id]
                self._add_free(cached_id)
        if self.beside is not None:
            self.beside.publish(block_id, block_hash)
        return block_hash

    def block_hash(self, block_id: int) -> bytes | None:
        """Returns the hash under which a block was registered, which is the next block's parent hash.

        Returns None before the block is registered.
        """
        return self._hashes[block_id]

    def draft_filled(self, block_id: int, incarnation: int) -> int:
        """Returns the number of positions, from a block's start, whose draft KV this drafter incarnation holds."""
        return self._draft_filled[block_id] if self._draft_incarnations[block_id] == incarnation else 0

    def set_draft_filled(self, block_id: int, incarnation: int, num_positions: int) -> None:
        """Records that the drafter holds the KV of a block's first positions.

        The number is lowered only for another incarnation.

        Raises:
            ValueError: num_positions is not within the block.
        """
        if not 0 <= num_positions <= self.block_size:
            raise ValueError(f"num_positions is {num_positions}: a block holds {self.block_size}")
        self._draft_filled[block_id] = max(self.draft_filled(block_id, incarnation), num_positions)
        self._draft_incarnations[block_id] = incarnation

    def reset_cache(self) -> None:
        """Drops every cached prefix that is not pinned.

        Live blocks stay with their owners; blocks that fill up later are cached again.
        """
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        self._cached = {self._hashes[block_id]: block_id for block_id in self._pins}
        if self.beside is not None:
            self.beside.clear()
        self.log.cleared()
        for block_hash in self._cached:
            self.log.cached(block_hash)

    def forget(self) -> None:
        """Resets to the initial state: no cached blocks, and all counts zero.

        Raises:
            IntegrityError: a block is live.
        """
        _require(not any(self._ref_counts), "the cache cannot be forgotten while blocks are live")
        self._start()
        if self.beside is not None:
            self.beside.clear()
        self.log.cleared()

    def check_integrity(self, live_tables: Iterable[Sequence[int]]) -> None:
        """Checks that the bookkeeping is consistent with itself, with the pins, and with every block table in use.

        Raises:
            IntegrityError: the bookkeeping is inconsistent; the message names the first inconsistent block.
        """
        held = Counter(self._pins)
        for table in live_tables:
            counts = Counter(table)
            twice = [block_id for block_id, count in counts.items() if count > 1]
            _require(not twice, f"blocks {twice} occur more than once in one table")
            held.update(counts.keys())
        outside = [block_id for block_id in held if not RESERVED_BLOCK < block_id < self.num_blocks]
        _require(not outside, f"tables hold blocks {outside}, outside 1..{self.num_blocks - 1}")
        free = Counter(self._free)
        free.update(self._free_cached.keys())
        _require(free[RESERVED_BLOCK] == 0, f"block {RESERVED_BLOCK} is reserved, but in the free list")
        for block_id in range(RESERVED_BLOCK + 1, self.num_blocks):
            references = self._ref_counts[block_id]
            _require(
                references == held[block_id],
                f"block {block_id}: {references} references counted, {held[block_id]} tables hold it",
            )
            listed = free[block_id]
            _require(listed == (references == 0), f"block {block_id}: {references} references, {listed} times free")
        self._check_cache()

    def _check_cache(self) -> None:
        for block_hash, block_id in self._cached.items():
            _require(self._hashes[block_id] == block_hash, f"block {block_id} is cached under a hash it does not have")
        for block_id in self._free_cached:
            _require(self._is_cached(block_id), f"block {block_id} is in the cached free list, but not cached")
        for block_id in self._free:
            _require(not self._is_cached(block_id), f"block {block_id} is cached, but in the plain free list")
        if self.beside is not None:
            mismatch = self.beside.mismatch(self._cached)
            _require(mismatch is None, str(mismatch))

    def _add_free(self, block_id: int) -> None:
        self._free.append(block_id)
        if self.beside is not None:
            self.beside.discard(block_id)

    def _is_cached(self, block_id: int) -> bool:
        block_hash = self._hashes[block_id]
        return block_hash is not None and self._cached.get(block_hash) == block_id

    def _evict(self) -> int:
        """Evicts the least recently used cached block and returns its id."""
        block_id, _ = self._free_cached.popitem(last=False)
        block_hash = self._hashes[block_id]
        del self._cached[block_hash]
        if self.beside is not None:
            self.beside.dropped(block_hash)
            self.beside.discard(block_id)
        self.log.dropped(block_hash)
        return block_id


def _require(condition: bool, mismatch: str) -> None:
    if not condition:
        raise IntegrityError(mismatch)
