"""The log of a prefix cache determines the cache's contents, and contains no more than that."""

import random

from wingbeat.runtime.kv.block_hashes import HASH_BYTES, ROOT_HASH, CacheChanges, CacheLog, hash_block, split_hashes
from wingbeat.runtime.kv.blocks import BlockManager


def test_whoever_applies_the_changes_of_a_busy_cache_knows_its_content_at_every_time():
    rng, manager, known = random.Random(7), BlockManager(12, 2), set()
    for _ in range(400):
        prompt = [rng.randrange(3) for _ in range(2 * rng.randrange(1, 5))]
        if rng.random() < 0.03:
            manager.reset_cache()
        table = manager.match_prefix(prompt)
        manager.acquire(table)
        table += manager.allocate(len(prompt) // 2 - len(table))
        parent = ROOT_HASH
        for place, block_id in enumerate(table):
            parent = manager.register(block_id, parent, prompt[2 * place : 2 * place + 2])
        manager.release(table)
        if rng.random() < 0.3 and (changes := manager.log.drain()) is not None:
            known = set() if changes.cleared else known
            known -= set(split_hashes(changes.dropped))
            known |= set(split_hashes(changes.cached))
            assert known == {block_hash[:HASH_BYTES] for block_hash in manager._cached}
    assert known


def test_what_comes_and_goes_between_two_questions_is_not_told():
    log, block_hash = CacheLog(), hash_block(ROOT_HASH, [1, 2])
    log.cached(block_hash)
    log.dropped(block_hash)
    assert log.drain() is None


def test_changes_that_are_passed_on_together_say_the_same_as_one_after_the_other():
    log, (one, two) = CacheLog(), (hash_block(ROOT_HASH, [n])[:HASH_BYTES] for n in (1, 2))
    log.add(CacheChanges(cached=one))
    log.add(CacheChanges(dropped=one, cached=two))
    assert log.drain() == CacheChanges(cached=two)
    log.add(CacheChanges(dropped=two))
    log.add(CacheChanges(cleared=True, cached=one))
    assert log.drain() == CacheChanges(cleared=True, cached=one)
