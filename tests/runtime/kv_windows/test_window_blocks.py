"""Places of blocks: kept while a window needs them, found again while nobody else does, and never owned twice."""

import random

import pytest

from wingbeat.runtime.kv.blocks import BlockManager, IntegrityError
from wingbeat.runtime.kv_windows.window_blocks import WindowBlocks

REACHED = 2


def manager(num_places, num_blocks=20, num_spare=4):
    return BlockManager(num_blocks, 4, beside=WindowBlocks(num_blocks, num_places, REACHED, num_spare))


def fill(blocks, tokens, held=None):
    """A sequence's full blocks, computed and registered; the first `held` of them have had places."""
    table, parent = blocks.allocate(len(tokens) // 4), bytes(16)
    blocks.beside.hold(table[:held])
    for index, block in enumerate(table):
        parent = blocks.register(block, parent, tokens[4 * index : 4 * index + 4])
    return table


def end(blocks, table, held=None):
    blocks.beside.let_go(table[:held], soon=False)
    blocks.release(table)
    blocks.check_integrity([])


def test_a_prefix_ends_where_the_blocks_that_its_window_reaches_still_are():
    blocks = manager(num_places=5)
    table = fill(blocks, list(range(16)))
    end(blocks, table)
    assert blocks.match_prefix([*range(16), 99]) == table
    blocks.beside.discard(table[1])
    assert blocks.match_prefix([*range(16), 99]) == table, "the window reaches the last two blocks alone"
    assert blocks.match_prefix([*range(12), 98, 99]) == table[:1], "of three blocks the second is lost"
    blocks.beside.discard(table[0])
    assert blocks.match_prefix([*range(12), 98, 99]) == []


def test_places_that_windows_have_passed_are_taken_before_those_at_the_end_of_a_sequence():
    blocks = manager(num_places=5)
    table = fill(blocks, list(range(16)))
    blocks.beside.let_go(table[:2], soon=True)
    end_of = table[2:]
    blocks.beside.let_go(end_of, soon=False)
    blocks.release(table)
    other = blocks.allocate(2)
    blocks.beside.hold(other)
    assert blocks.match_prefix([*range(16), 99]) == table
    blocks.beside.let_go(other, soon=True)
    blocks.release(other)
    blocks.check_integrity([])


def test_a_window_that_was_asked_for_stays_next_time():
    blocks = manager(num_places=5)
    table = fill(blocks, list(range(16)), held=0)
    end(blocks, table, held=0)
    assert blocks.match_prefix([*range(8), 98, 99]) == []
    again = fill(blocks, list(range(16)))
    assert again != table
    blocks.beside.let_go(again, soon=True)
    blocks.release(again)
    other = blocks.allocate(2)
    blocks.beside.hold(other)
    assert blocks.match_prefix([*range(8), 98, 99]) == again[:2], "computed blocks replace those that have no place"


def test_a_replay_s_blocks_count_only_once_they_are_filled():
    blocks = manager(num_places=8)
    table = fill(blocks, list(range(16)), held=0)
    blocks.beside.hold_for_replay(table[:2])
    assert not blocks.beside.has(table[:1])
    blocks.beside.filled(table[:1])
    assert blocks.beside.has(table[:1])
    blocks.beside.let_go(table[:2], soon=True)
    assert blocks.beside.has(table[:1])
    assert not blocks.beside.has(table[1:2])
    blocks.release(table)
    blocks.check_integrity([])


def test_pinned_windows_stay():
    blocks = manager(num_places=5)
    table = fill(blocks, list(range(16)))
    end(blocks, table)
    blocks.pin(table)
    other = blocks.allocate(2)
    blocks.beside.hold(other)
    assert blocks.match_prefix([*range(16), 99]) == table
    with pytest.raises(IntegrityError, match=r"all 4 blocks .* are held"):
        blocks.beside.hold(blocks.allocate(1))


def test_a_prefix_without_its_window_cannot_be_pinned():
    blocks = manager(num_places=5)
    table = fill(blocks, list(range(16)), held=3)
    with pytest.raises(KeyError, match="no longer keep the end"):
        blocks.pin(table)
    assert blocks.num_pinned == 0


def test_the_books_balance_whatever_comes():
    chance, blocks = random.Random(4), manager(num_places=12, num_blocks=40)
    running: list[tuple[list[int], int, int]] = []
    for _ in range(400):
        if running and (len(running) == 3 or chance.random() < 0.4):
            table, first, last = running.pop(chance.randrange(len(running)))
            blocks.beside.let_go(table[first:last], soon=False)
            blocks.release(table)
        else:
            tokens = [chance.randrange(2) for _ in range(20)]
            cached = blocks.match_prefix(tokens)
            blocks.acquire(cached)
            table, first = [*cached, *blocks.allocate(5 - len(cached))], max(len(cached) - REACHED, 0)
            assert blocks.beside.has(table[first : len(cached)])
            blocks.beside.hold(table[first : len(cached) + 1])
            parent = blocks.block_hash(cached[-1]) if cached else bytes(16)
            for index in range(len(cached), 5):
                if index > len(cached):
                    reached = max(first, index - REACHED)
                    blocks.beside.let_go(table[first:reached], soon=True)
                    first = reached
                    blocks.beside.hold(table[index : index + 1])
                parent = blocks.register(table[index], parent, tokens[4 * index : 4 * index + 4])
            running.append((table, first, 5))
        if chance.random() < 0.05:
            blocks.reset_cache()
        blocks.check_integrity([table for table, _, _ in running])
    for table, first, last in running:
        blocks.beside.let_go(table[first:last], soon=False)
        blocks.release(table)
    assert blocks.beside.num_held == 0
    assert blocks.hit_tokens > 0
