"""Which prefixes an engine has cached, as those who choose an engine know it: block hashes, no tokens.

A block's hash is chained over all tokens before it, so that a set of hashes, looked up block by block, is a radix tree.
"""

from collections import OrderedDict
from collections.abc import Sequence

from wingbeat.runtime.kv.block_hash import hash_block, salted_root
from wingbeat.runtime.kv.cache_log import HASH_BYTES, CacheChanges, split_hashes

MAX_BLOCKS = 2**18
"""Known of one engine; beyond, those that were told first are forgotten."""


class PromptBlocks:
    """Hashes of a prompt's full blocks, made as far as somebody asks.

    Args:
        block_size: tokens per block; 0 where engines cache none.
        salt: of the request; prompts share prefixes with others of the same salt only.
        adapter: digest of the request's; the same holds for it.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> None:
        self.num_tokens = len(token_ids)
        self.block_size = block_size
        # At least the last token is left to compute, as in the engine.
        self.num_blocks = max(0, len(token_ids) - 1) // block_size if block_size else 0
        self._token_ids = token_ids
        self._last = salted_root(salt, adapter)
        self._hashes: list[bytes] = []

    def hash(self, index: int) -> bytes:
        """Of a block and all before it."""
        while len(self._hashes) <= index:
            begin = len(self._hashes) * self.block_size
            self._last = hash_block(self._last, self._token_ids[begin : begin + self.block_size])
            self._hashes.append(self._last[:HASH_BYTES])
        return self._hashes[index]


class PrefixIndex:
    """One engine's cached blocks, kept up by its `CacheChanges`."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def apply(self, changes: CacheChanges) -> None:
        """Take over what the engine's cache has gained and lost."""
        if changes.cleared:
            self._known.clear()
        for block_hash in split_hashes(changes.dropped):
            self._known.pop(block_hash, None)
        for block_hash in split_hashes(changes.cached):
            self._known[block_hash] = None
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)

    def snapshot(self) -> CacheChanges:
        """Changes that make any index equal to this one."""
        return CacheChanges(cleared=True, cached=b"".join(self._known))

    def num_cached_tokens(self, prompt: PromptBlocks) -> int:
        """Tokens at the prompt's beginning that the engine does not have to compute."""
        index = 0
        while index < prompt.num_blocks and prompt.hash(index) in self._known:
            index += 1
        return index * prompt.block_size
