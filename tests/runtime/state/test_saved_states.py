"""States of prefixes: found as long as their block is cached and they have a row, and never two owners of a row."""

import random

import pytest

from wingbeat.runtime.kv.blocks import BlockManager, NoFreeBlocks
from wingbeat.runtime.state.saved_states import SavedStates


def manager(num_rows, num_blocks=9, size=4, interval=4):
    return BlockManager(num_blocks, size, beside=SavedStates(num_rows, interval, size))


def fill(blocks, tokens, saved=()):
    """A sequence's full blocks, registered; states are taken at the ends of those in `saved`."""
    table, parent = blocks.allocate(len(tokens) // 4), bytes(16)
    rows = [blocks.beside.allocate_row(table[index]) for index in saved]
    for index, block in enumerate(table):
        parent = blocks.register(block, parent, tokens[4 * index : 4 * index + 4])
    return table, rows


def test_a_prefix_is_cut_back_to_the_last_block_with_a_state():
    blocks = manager(4)
    table, _ = fill(blocks, list(range(16)), saved=(0, 2))
    assert blocks.match_prefix([*range(16), 99]) == table[:3]
    assert blocks.match_prefix([*range(12), 98, 99]) == table[:3]
    assert blocks.match_prefix([*range(8), 98, 99]) == table[:1]
    assert blocks.hit_tokens == 12 + 12 + 4


def test_a_state_leaves_with_its_block():
    blocks = manager(4, num_blocks=5)
    table, _ = fill(blocks, list(range(16)), saved=(1, 3))
    blocks.release(table)
    assert blocks.beside.num_cached == 2
    blocks.allocate(2)
    assert blocks.beside.num_cached == 1
    assert blocks.match_prefix([*range(16), 99]) == table[:2]
    blocks.reset_cache()
    assert blocks.beside.num_cached == 0


def test_the_least_recently_found_state_makes_room():
    blocks = manager(2)
    (first, *_), _ = fill(blocks, [1] * 4, saved=(0,))
    fill(blocks, [2] * 4, saved=(0,))
    blocks.beside.find(blocks.block_hash(first))
    fill(blocks, [3] * 4, saved=(0,))
    assert [bool(blocks.match_prefix([token] * 4 + [0])) for token in (1, 2, 3)] == [True, False, True]


def test_of_more_states_than_rows_the_last_ones_of_a_prompt_stay():
    blocks = manager(2)
    table, rows = fill(blocks, list(range(20)), saved=(0, 1, 2, 3))
    assert rows[2:] == rows[:2]
    assert blocks.match_prefix([*range(20), 99]) == table[:4]
    assert blocks.match_prefix([*range(8), 98, 99]) == []


def test_states_of_blocks_that_are_never_full_are_nobodys():
    blocks = manager(1)
    table = blocks.allocate(1)
    assert blocks.beside.allocate_row(table[0]) is not None
    blocks.release(table)
    blocks.check_integrity([])
    assert blocks.beside.lend() is not None


def test_a_second_state_of_the_same_prefix_is_given_back():
    blocks = manager(3)
    tables = [fill(blocks, [7] * 4, saved=(0,))[0] for _ in range(2)]
    assert blocks.beside.num_cached == 1
    blocks.check_integrity(tables)


@pytest.mark.parametrize("fields", [(0, 4, 4), (1, 6, 4), (1, 0, 4)])
def test_sizes_that_cannot_be_are_refused(fields):
    with pytest.raises(ValueError, match=r"num_saved_states is 0|state_interval is"):
        SavedStates(*fields)


@pytest.mark.parametrize("seed", range(3))
def test_rows_add_up_whatever_happens(seed):
    chance, blocks, live, lent = random.Random(seed), manager(3, num_blocks=12), [], []
    for _ in range(300):
        try:
            tokens = [chance.randrange(3)] * 4 * chance.randrange(1, 4)
            live.append(fill(blocks, tokens, saved=chance.sample(range(len(tokens) // 4), 1))[0])
        except NoFreeBlocks:
            blocks.release(live.pop(chance.randrange(len(live))))
        if len(lent) < 2 and (row := blocks.beside.lend()) is not None:
            lent.append(row)
        elif lent:
            blocks.beside.give_back(lent.pop())
        blocks.check_integrity(live)


def test_a_pinned_state_makes_no_room_and_is_not_forgotten():
    blocks = manager(2)
    table, _ = fill(blocks, [1] * 4, saved=(0,))
    blocks.pin(table)
    for token in (2, 3):
        fill(blocks, [token] * 4, saved=(0,))
    assert [bool(blocks.match_prefix([token] * 4 + [0])) for token in (1, 2, 3)] == [True, False, True]
    blocks.reset_cache()
    assert blocks.match_prefix([1] * 4 + [0]) == table
    blocks.unpin(table)
    assert blocks.beside.num_pinned == 0
    blocks.reset_cache()
    assert blocks.match_prefix([1] * 4 + [0]) == []


def test_a_prefix_whose_state_is_not_kept_is_not_pinned():
    blocks = manager(2)
    table, _ = fill(blocks, list(range(8)), saved=(0,))
    with pytest.raises(KeyError):
        blocks.pin(table)
    assert blocks.num_pinned == 0
    blocks.check_integrity([table])
