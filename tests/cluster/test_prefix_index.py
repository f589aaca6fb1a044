"""A router's index of the prefixes that an engine has cached."""

import pytest

from wingbeat.cluster.routing import PrefixIndex, PromptBlocks
from wingbeat.runtime.kv.block_hashes import HASH_BYTES, ROOT_HASH, CacheChanges, hash_block, salted_root
from wingbeat.runtime.kv.blocks import BlockManager


def chain(token_ids: list[int], block_size: int = 4, root: bytes = ROOT_HASH) -> bytes:
    joined = b""
    for begin in range(0, len(token_ids) - block_size + 1, block_size):
        root = hash_block(root, token_ids[begin : begin + block_size])
        joined += root[:HASH_BYTES]
    return joined


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 13, 40])
def test_it_finds_as_much_of_a_prompt_as_the_engine_does(length):
    manager, index = BlockManager(16, 4), PrefixIndex()
    table, parent = manager.allocate(3), ROOT_HASH
    for place, block_id in enumerate(table):
        parent = manager.register(block_id, parent, list(range(4 * place, 4 * place + 4)))
    index.apply(manager.log.drain())
    prompt = list(range(length))
    assert index.num_cached_tokens(PromptBlocks(prompt, 4)) == 4 * len(manager.match_prefix(prompt))


def test_a_salted_prompt_finds_only_what_was_cached_under_its_salt():
    index, prompt = PrefixIndex(), list(range(9))
    index.apply(CacheChanges(cached=chain(prompt, root=salted_root("a"))))
    assert [index.num_cached_tokens(PromptBlocks(prompt, 4, salt)) for salt in ("", "a", "b")] == [0, 8, 0]


def test_engines_without_a_cache_have_nothing_cached():
    index, prompt = PrefixIndex(), list(range(9))
    index.apply(CacheChanges(cached=chain(prompt)))
    assert index.num_cached_tokens(PromptBlocks(prompt, 0)) == 0


def test_what_was_dropped_ends_the_prefix_and_a_reset_ends_all():
    index, prompt = PrefixIndex(), list(range(13))
    hashes = chain(prompt)
    index.apply(CacheChanges(cached=hashes))
    index.apply(CacheChanges(dropped=hashes[HASH_BYTES : 2 * HASH_BYTES]))
    assert index.num_cached_tokens(PromptBlocks(prompt, 4)) == 4
    index.apply(CacheChanges(cleared=True))
    assert len(index) == 0


def test_it_is_bounded_and_forgets_what_it_learned_first():
    index = PrefixIndex(max_blocks=2)
    index.apply(CacheChanges(cached=chain(list(range(12)))))
    assert len(index) == 2
    assert index.num_cached_tokens(PromptBlocks(list(range(13)), 4)) == 0


def test_a_snapshot_makes_another_index_equal():
    one, other = PrefixIndex(), PrefixIndex()
    one.apply(CacheChanges(cached=chain(list(range(8)))))
    other.apply(CacheChanges(cached=chain(list(range(50, 90)))))
    other.apply(one.snapshot())
    assert other.snapshot() == one.snapshot()
