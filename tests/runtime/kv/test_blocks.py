"""Block bookkeeping: nothing handed out twice, prefixes found again, and errors that name the block."""

import random

import pytest

from wingbeat.runtime.kv.block_hashes import ROOT_HASH, hash_block
from wingbeat.runtime.kv.blocks import BlockManager, IntegrityError, NoFreeBlocks


def fill(manager: BlockManager, table: list[int], token_ids: list[int]) -> None:
    """Register every full block of a sequence."""
    parent, size = ROOT_HASH, manager.block_size
    for place in range(len(token_ids) // size):
        parent = manager.register(table[place], parent, token_ids[place * size : (place + 1) * size])


def cached_sequence(manager: BlockManager, token_ids: list[int]) -> list[int]:
    table = manager.allocate(-(-len(token_ids) // manager.block_size))
    fill(manager, table, token_ids)
    return table


def test_a_fresh_pool_hands_out_every_block_but_the_reserved_one():
    manager = BlockManager(6, 4)
    assert manager.num_free == 5
    assert manager.allocate(5) == [1, 2, 3, 4, 5]
    with pytest.raises(NoFreeBlocks, match="1 blocks wanted, 0 of 5"):
        manager.allocate(1)


def test_a_refused_allocation_changes_nothing():
    manager = BlockManager(4, 4)
    table = cached_sequence(manager, list(range(8)))
    manager.release(table)
    with pytest.raises(NoFreeBlocks):
        manager.allocate(4)
    manager.check_integrity([])
    assert manager.match_prefix(list(range(9))) == table


@pytest.mark.parametrize(("prompt_len", "hits"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (40, 3)])
def test_prefixes_match_in_full_blocks_and_never_the_whole_prompt(prompt_len, hits):
    manager = BlockManager(16, 4)
    table = cached_sequence(manager, list(range(14)))
    assert manager.match_prefix(list(range(prompt_len))) == table[:hits]
    assert (manager.query_tokens, manager.hit_tokens) == (prompt_len, 4 * hits)


def test_equal_blocks_after_different_prefixes_do_not_match():
    manager = BlockManager(16, 2)
    cached_sequence(manager, [1, 2, 3, 4])
    assert manager.match_prefix([9, 9, 3, 4, 5]) == []
    assert manager.match_prefix([3, 4, 5]) == []
    assert manager.match_prefix([1, 2, 3, 4, 5], root_hash=b"other weights") == []


def test_caching_off_finds_nothing():
    manager = BlockManager(8, 2, enable_prefix_caching=False)
    table = cached_sequence(manager, [1, 2, 3, 4])
    assert manager.match_prefix([1, 2, 3, 4, 5]) == []
    manager.release(table)
    manager.check_integrity([])


def test_released_prefixes_live_until_evicted_oldest_first_and_from_the_end():
    manager = BlockManager(5, 1)
    old, new = cached_sequence(manager, [1, 2]), cached_sequence(manager, [7, 8])
    manager.release(old)
    manager.release(new)
    survivors = []
    for _ in range(4):
        manager.allocate(1)
        survivors.append((len(manager.match_prefix([1, 2, 0])), len(manager.match_prefix([7, 8, 0]))))
    assert survivors == [(1, 2), (0, 2), (0, 1), (0, 0)]


def test_blocks_without_cached_content_are_used_before_cached_ones():
    manager = BlockManager(4, 2)
    cached, plain = cached_sequence(manager, [1, 2]), manager.allocate(2)
    manager.release(cached)
    manager.release(plain)
    assert sorted(manager.allocate(2)) == sorted(plain)
    assert manager.match_prefix([1, 2, 3]) == cached


def test_an_acquired_prefix_is_not_evicted():
    manager = BlockManager(4, 2)
    table = cached_sequence(manager, [1, 2, 3, 4])
    manager.release(table)
    manager.acquire(table)
    manager.allocate(1)
    with pytest.raises(NoFreeBlocks):
        manager.allocate(1)
    manager.release(table)
    assert manager.match_prefix([1, 2, 3, 4, 5]) == table


def test_equal_content_in_two_blocks_is_cached_once():
    manager = BlockManager(8, 2)
    first, second = cached_sequence(manager, [1, 2]), cached_sequence(manager, [1, 2])
    assert first != second
    assert manager.match_prefix([1, 2, 3]) == first
    assert manager.block_hash(first[0]) == manager.block_hash(second[0]) == hash_block(ROOT_HASH, [1, 2])
    manager.check_integrity([first, second])
    manager.release(second)
    manager.check_integrity([first])
    assert manager.match_prefix([1, 2, 3]) == first


def test_draft_validity_grows_within_an_incarnation_and_ends_with_it():
    manager = BlockManager(3, 4)
    (block_id,) = manager.allocate(1)
    assert manager.draft_filled(block_id, 0) == 0
    manager.set_draft_filled(block_id, 1, 3)
    manager.set_draft_filled(block_id, 1, 2)
    assert manager.draft_filled(block_id, 1) == 3
    assert manager.draft_filled(block_id, 2) == 0
    manager.set_draft_filled(block_id, 2, 1)
    assert manager.draft_filled(block_id, 2) == 1
    assert manager.draft_filled(block_id, 1) == 0
    with pytest.raises(ValueError, match="a block holds 4"):
        manager.set_draft_filled(block_id, 2, 5)


def test_draft_validity_survives_the_cache_but_not_reallocation():
    manager = BlockManager(3, 2)
    table = cached_sequence(manager, [1, 2])
    manager.set_draft_filled(table[0], 1, 2)
    manager.release(table)
    manager.acquire(manager.match_prefix([1, 2, 3]))
    assert manager.draft_filled(table[0], 1) == 2
    manager.release(table)
    assert all(manager.draft_filled(block_id, 1) == 0 for block_id in manager.allocate(2))


def test_misuse_is_refused_by_name():
    manager = BlockManager(5, 2)
    table = manager.allocate(2)
    manager.release(table[1:])
    with pytest.raises(IntegrityError, match="block 2 released, but it is not live"):
        manager.release([2])
    with pytest.raises(IntegrityError, match="block 2 acquired"):
        manager.acquire([2])
    with pytest.raises(IntegrityError, match="block 0 released"):
        manager.release([0])
    with pytest.raises(IntegrityError, match="block 2 registered, but"):
        manager.register(2, ROOT_HASH, [1, 2])
    with pytest.raises(ValueError, match="1 tokens"):
        manager.register(1, ROOT_HASH, [1])
    manager.register(1, ROOT_HASH, [1, 2])
    with pytest.raises(IntegrityError, match="different content"):
        manager.register(1, ROOT_HASH, [3, 4])
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockManager(1, 2)


def test_integrity_names_what_does_not_add_up():
    manager = BlockManager(5, 2)
    table = manager.allocate(2)
    manager.check_integrity([table])
    with pytest.raises(IntegrityError, match="block 1: 1 references counted, 0 tables"):
        manager.check_integrity([])
    with pytest.raises(IntegrityError, match="block 1: 1 references counted, 2 tables"):
        manager.check_integrity([table, table])
    with pytest.raises(IntegrityError, match="block 3: 0 references counted, 1 tables"):
        manager.check_integrity([[*table, 3]])
    with pytest.raises(IntegrityError, match="more than once"):
        manager.check_integrity([[1, 2, 1]])
    with pytest.raises(IntegrityError, match=r"tables hold blocks \[0\]"):
        manager.check_integrity([[0], table])


@pytest.mark.few(2)
@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cached", "plain"])
@pytest.mark.parametrize("seed", range(6))
def test_random_lives_keep_the_books_straight(seed, enable_prefix_caching):
    """Sequences over two tokens (so that prefixes collide often) start, grow, end and are preempted at random."""
    rng = random.Random(seed)
    num_blocks, size = 24, 2
    manager = BlockManager(num_blocks, size, enable_prefix_caching)
    contents: dict[int, tuple[int, ...]] = {}
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(1500):
        if live and rng.random() < 0.35:
            table, _ = live.pop(rng.randrange(len(live)))
            manager.release(table)
        elif live and rng.random() < 0.4:
            table, tokens = rng.choice(live)
            tokens.append(rng.randrange(2))
        else:
            table, tokens = [], [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            matched = manager.match_prefix(tokens)
            assert len(matched) * size < len(tokens)
            for place, block_id in enumerate(matched):
                assert contents[block_id] == tuple(tokens[: (place + 1) * size]), "a hit holds what was asked for"
            manager.acquire(matched)
            table.extend(matched)
            live.append((table, tokens))
        if live:
            grow(manager, live, contents)
        manager.check_integrity([table for table, _ in live])
    assert enable_prefix_caching == (manager.hit_tokens > 0)


def grow(manager: BlockManager, live: list[tuple[list[int], list[int]]], contents: dict[int, tuple[int, ...]]) -> None:
    """Give every sequence the blocks its tokens need, dropping the newest sequences where there are none."""
    for table, tokens in list(live):
        wanted = -(-len(tokens) // manager.block_size) - len(table)
        while wanted > manager.num_free and live[-1][0] is not table:
            manager.release(live.pop()[0])
        if not any(table is other for other, _ in live):
            continue
        if wanted > manager.num_free:
            with pytest.raises(NoFreeBlocks):
                manager.allocate(wanted)
            manager.release(live.pop()[0])
            continue
        fresh = manager.allocate(wanted)
        held = {block_id for other, _ in live for block_id in other}
        assert not held & {0, *fresh}, "a block in use was handed out"
        assert len(set(fresh)) == wanted
        table.extend(fresh)
        for block_id in fresh:
            contents.pop(block_id, None)
        fill(manager, table, tokens)
        for place in range(len(tokens) // manager.block_size):
            contents[table[place]] = tuple(tokens[: (place + 1) * manager.block_size])


def test_a_reset_forgets_what_is_cached_and_leaves_what_is_live():
    manager = BlockManager(num_blocks=6, block_size=2)
    first, second = list(range(5)), [9, 8, 7, 6, 5]
    tables = []
    for prompt in (first, second):
        table = manager.allocate(2)
        block_hash = ROOT_HASH
        for index, block_id in enumerate(table):
            block_hash = manager.register(block_id, block_hash, prompt[2 * index : 2 * index + 2])
        tables.append(table)
    manager.release(tables[0])
    manager.reset_cache()
    assert manager.match_prefix(first) == manager.match_prefix(second) == []
    manager.check_integrity([tables[1]])
    assert manager.num_free == 3
    manager.release(tables[1])
    manager.check_integrity([])
    assert manager.match_prefix(second) == []
    (block_id,) = manager.allocate(1)
    manager.register(block_id, ROOT_HASH, first[:2])
    assert manager.match_prefix(first) == [block_id]
    manager.check_integrity([[block_id]])


def test_eviction_never_takes_a_pinned_block():
    manager = BlockManager(8, 2)
    table = cached_sequence(manager, [1, 2, 3, 4, 5, 6])
    manager.release(table)
    manager.pin(table[:2])
    assert (manager.num_pinned, manager.num_free) == (2, 5)
    others = manager.allocate(5)
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7]) == table[:2]
    with pytest.raises(NoFreeBlocks):
        manager.allocate(1)
    manager.check_integrity([others])


def test_what_is_unpinned_is_an_ordinary_cached_prefix_again():
    manager = BlockManager(4, 2)
    table = cached_sequence(manager, [1, 2, 3, 4])
    manager.pin(table)
    manager.release(table)
    manager.unpin(table)
    assert (manager.num_pinned, manager.num_free) == (0, 3)
    assert manager.match_prefix([1, 2, 3, 4, 5]) == table
    manager.allocate(3)
    assert manager.match_prefix([1, 2, 3, 4, 5]) == []


def test_a_block_of_two_pinned_prefixes_counts_once_and_stays_for_the_second():
    manager = BlockManager(8, 2)
    table = cached_sequence(manager, [1, 2, 3, 4])
    manager.pin(table)
    manager.pin(table[:1])
    manager.release(table)
    assert manager.num_pinned == 2
    manager.unpin(table)
    assert (manager.num_pinned, manager.is_pinned(table[0]), manager.is_pinned(table[1])) == (1, True, False)
    manager.check_integrity([])


def test_a_reset_forgets_all_but_pinned_prefixes():
    manager = BlockManager(8, 2)
    kept, lost = cached_sequence(manager, [1, 2, 3, 4]), cached_sequence(manager, [5, 6])
    manager.pin(kept)
    manager.release(kept)
    manager.release(lost)
    manager.log.drain()
    manager.reset_cache()
    assert manager.match_prefix([1, 2, 3, 4, 5]) == kept
    assert manager.match_prefix([5, 6, 7]) == []
    changes = manager.log.drain()
    assert (changes.cleared, len(changes.cached)) == (True, 2 * 8)
    manager.check_integrity([])


def test_only_what_is_cached_is_pinned_and_only_what_is_pinned_unpinned():
    manager = BlockManager(8, 2)
    table = cached_sequence(manager, [1, 2, 3, 4])
    plain = manager.allocate(1)
    with pytest.raises(IntegrityError, match="to be pinned, but not cached"):
        manager.pin([*table, *plain])
    with pytest.raises(IntegrityError, match="to be unpinned, but not pinned"):
        manager.unpin(table)
    assert manager.num_pinned == 0
    manager.check_integrity([table, plain])
