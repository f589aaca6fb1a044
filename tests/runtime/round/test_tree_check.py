"""Trees that arrive are believed only where they follow the rules and start from the sequence's present end."""

import pytest
import torch

from wingbeat.kernels.round.reference import DraftedFor, TreeRules, believed, well_formed
from wingbeat.kernels.tree.results import GrownTree
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.round.slots import DecodeRows, SlotState

CPU = torch.device("cpu")


def tree_of(parents, depths, num_valid, token_ids=None):
    row = torch.tensor([parents])
    tokens = torch.tensor([token_ids]) if token_ids else torch.ones_like(row)
    return TokenTree(tokens, row, torch.tensor([depths]), torch.zeros(row.shape), torch.tensor([num_valid]))


@pytest.mark.parametrize(
    ("tree", "good", "good_chain"),
    [
        (tree_of([-1, 0, 1], [0, 1, 2], 3), True, True),
        (tree_of([-1, 0, 0], [0, 1, 1], 3), True, False),
        (tree_of([-1, 0, 9], [0, 1, 7], 2), True, True),
        (tree_of([-1, 0, 0], [0, 0, 0], 1), True, True),
        (tree_of([-1, 1, 0], [0, 1, 1], 3), False, False),
        (tree_of([-1, 0, 1], [0, 1, 1], 3), False, False),
        (tree_of([-1, 0, 1], [1, 2, 3], 3), False, False),
        (tree_of([-1, 0, 1], [0, 1, 2], 4), False, False),
        (tree_of([-1, 0, 1], [0, 1, 2], 0), False, False),
        (tree_of([-1, 0, 1], [0, 1, 2], 3, [1, 1, 10]), False, False),
        (tree_of([-1, 0, 1], [0, 1, 2], 3, [1, -1, 1]), False, False),
        (tree_of([-1, 0, 1], [0, 1, 2], 2, [1, 1, 10]), True, True),
    ],
)
def test_well_formed(tree, good, good_chain):
    for chains, expected in ((False, good), (True, good_chain)):
        usable, outside = well_formed(GrownTree(*tree), TreeRules(9, chains))
        assert usable.tolist() == [expected]
        assert outside.logical_not().sum() == tree.num_valid.clamp_max(3)


def test_the_root_is_its_own_kind_of_node():
    rules = TreeRules(9, chains=False)
    for parent in (0, 1, -2):
        assert well_formed(GrownTree(*tree_of([parent, 0, 1], [0, 1, 2], 3)), rules)[0].tolist() == [False]


def state_of(*rows):
    """Slots whose sequences have this epoch, committed length and last token."""
    state = SlotState(EngineConfig(max_num_seqs=len(rows), max_model_len=64), 10, CPU)
    for slot, (epoch, committed_len, last_token_id) in enumerate(rows):
        state.epochs[slot], state.committed_lens[slot] = epoch, committed_len
        state.last_token_ids[slot] = last_token_id
    return state


def chains_of(roots):
    count = len(roots)
    tokens = torch.tensor([[root, 5, 6] for root in roots])
    index = torch.arange(3).expand(count, -1).clone()
    return TokenTree(tokens, index - 1, index.clone(), torch.rand(count, 3), torch.full((count,), 3))


def checked_chains(trees, epochs, committed_lens, rows, state):
    grown = DraftedFor(epochs[rows.slots], committed_lens[rows.slots])
    return believed(GrownTree(*trees), grown, rows.slots, rows.wanted, state.columns, TreeRules(9, chains=True))


def test_only_what_was_grown_from_the_present_end_counts():
    state = state_of(*[(4, 20, 7)] * 6)
    ends = torch.tensor([[4, 3, 4, 4, 4, 4], [20, 20, 19, 20, 20, 20]])
    roots = [7, 7, 7, 8, 7, 7]
    trees = chains_of(roots)
    trees.depths[5, 2] = 1
    rows = DecodeRows(torch.arange(6), torch.tensor([1, 1, 1, 1, 0, 1], dtype=torch.bool))
    checked, usable = checked_chains(trees, *ends, rows, state)
    assert usable.tolist() == [True, False, False, False, False, False]
    assert checked.num_valid.tolist() == [3, 1, 1, 1, 1, 1]
    assert checked.token_ids[0].tolist() == [7, 5, 6]
    assert (checked.parents[0].tolist(), checked.depths[0].tolist()) == ([-1, 0, 1], [0, 1, 2])
    for field in (checked.token_ids, checked.parents, checked.depths):
        assert not field[1:].any()


def test_nodes_beyond_the_tree_reach_no_index():
    state = state_of((1, 9, 7))
    trees = chains_of([7])
    trees.num_valid[0] = 2
    trees.token_ids[0, 2], trees.parents[0, 2], trees.depths[0, 2] = 1 << 40, 99, -3
    rows = DecodeRows(torch.arange(1), torch.ones(1, dtype=torch.bool))
    checked, usable = checked_chains(trees, torch.tensor([1]), torch.tensor([9]), rows, state)
    assert usable.all()
    assert [int(field[0, 2]) for field in (checked.token_ids, checked.parents, checked.depths)] == [0, 0, 0]


def test_trees_are_told_by_slot_and_checked_by_decode():
    """Slot 1's tree is stale, slot 2's is not: whoever decodes in them, in whatever order."""
    state = state_of((1, 9, 7), (1, 9, 7), (2, 5, 7))
    epochs, committed_lens = torch.tensor([[1, 1, 2], [9, 8, 5]])
    rows = DecodeRows(torch.tensor([2, 1, 0]), torch.ones(3, dtype=torch.bool))
    _, usable = checked_chains(chains_of([7, 7, 7]), epochs, committed_lens, rows, state)
    assert usable.tolist() == [True, False, True]
