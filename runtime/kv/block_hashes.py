"""Hashes of KV blocks and of all tokens before them, and a log of hashes that a prefix cache gains and loses."""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

ROOT_HASH = bytes(16)
"""Parent hash of a sequence's first block."""


def hash_block(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """Returns the 128-bit BLAKE2b hash of a full block and all blocks before it.

    Equal hashes are treated as equal tokens, because at 128 bits collisions do not occur in practice.
    """
    return blake2b(parent_hash + array("q", token_ids).tobytes(), digest_size=16).digest()


def salted_root(salt: str, variant: str = "") -> bytes:
    """Returns the parent hash of the first block of sequences that share prefixes only within a salt and variant.

    Args:
        variant: digest of the variant's files, such as an adapter's; empty for the base model.
    """
    if not (salt or variant):
        return ROOT_HASH
    salted = salt.encode("utf-8", "surrogatepass")
    return blake2b(salted, digest_size=16, key=variant.encode(), person=b"salt").digest()


HASH_BYTES = 8
"""Number of bytes of a block hash that are sent to routers. A collision can only send a request to another engine,
never change a token."""


class CacheChanges(NamedTuple):
    """Changed hashes of `HASH_BYTES` bytes each, concatenated. Changes are applied in the order of the fields."""

    cleared: bool = False
    """Whether all earlier hashes were dropped."""
    dropped: bytes = b""
    cached: bytes = b""


class CacheLog:
    """Accumulates changes of a prefix cache.

    Opposite changes cancel each other, so that the log has at most as many entries as the cache.
    """

    def __init__(self) -> None:
        self._cleared = False
        self._dropped: dict[bytes, None] = {}
        self._cached: dict[bytes, None] = {}

    def cached(self, block_hash: bytes) -> None:
        """Logs that a prefix is in the cache from now on."""
        self._cached[block_hash[:HASH_BYTES]] = None

    def dropped(self, block_hash: bytes) -> None:
        """Logs that a prefix is no longer in the cache."""
        short = block_hash[:HASH_BYTES]
        if short in self._cached:
            del self._cached[short]
        else:
            self._dropped[short] = None

    def cleared(self) -> None:
        """Logs that the cache is empty."""
        self._cleared = True
        self._dropped.clear()
        self._cached.clear()

    def add(self, changes: CacheChanges) -> None:
        """Appends later changes."""
        if changes.cleared:
            self.cleared()
        for block_hash in split_hashes(changes.dropped):
            self.dropped(block_hash)
        for block_hash in split_hashes(changes.cached):
            self.cached(block_hash)

    def drain(self) -> CacheChanges | None:
        """Returns and clears the changes since the last call; None if nothing has changed."""
        if not (self._cleared or self._dropped or self._cached):
            return None
        changes = CacheChanges(self._cleared, b"".join(self._dropped), b"".join(self._cached))
        self._cleared = False
        self._dropped.clear()
        self._cached.clear()
        return changes


def split_hashes(joined: bytes) -> Iterable[bytes]:
    """Splits one field of `CacheChanges` into hashes."""
    return (joined[begin : begin + HASH_BYTES] for begin in range(0, len(joined), HASH_BYTES))
