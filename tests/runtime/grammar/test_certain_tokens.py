"""Trees that get chains of forced tokens stay valid trees, and lose only nodes that have no room."""

import random

import pytest
import torch

from tests.runtime.scripted import random_tree, tree_tensors, well_formed
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.grammar.certain_trees import add_certain, with_certain
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence

TREE, CHAIN = SpeculationConfig(5, 4, 12), SpeculationConfig(5, 1, 6)


class Certain:
    """A grammar that forces the given tokens next, and forbids some others."""

    def __init__(self, tokens, forbidden=()):
        self.tokens, self.forbidden = tokens, forbidden

    def forced(self, most):
        return self.tokens[:most]

    def allows(self, token_id):
        return token_id not in self.forbidden


def plan_of(*maskers, speculation=True):
    seqs = [Sequence(Request("", (1,), SamplingParams(64, speculation=speculation)), masker) for masker in maskers]
    return SchedulerOutput(seqs, [], [], 0)


def paths(tree, row):
    found = {0: ()}
    for node in range(1, int(tree.num_valid[row])):
        found[node] = (*found[int(tree.parents[row, node])], int(tree.token_ids[row, node]))
    return list(found.values())[1:]


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_holds_what_is_certain_and_keeps_its_first_nodes(seed):
    chance = random.Random(seed)
    nodes = [random_tree([5, 6, 7], 100, chance)[:11] for _ in range(3)]
    chains = [[chance.choice([5, 6, 7]) for _ in range(chance.randrange(7))] for _ in range(3)]
    trees = tree_tensors([1, 2, 3], nodes, 12)
    before = [paths(trees, row) for row in range(3)]
    plan = plan_of(*map(Certain, chains))
    for added in (with_certain(plan, trees, TREE), add_certain(plan, trees, TREE, torch.device("cpu"))):
        assert well_formed(added, 100)
        for row, (chain, had) in enumerate(zip(chains, before, strict=True)):
            got = paths(added, row)
            assert all(tuple(chain[:depth]) in got for depth in range(1, min(len(chain), 5) + 1))
            kept = min(len(had), 11 - min(len(chain), 5))
            assert got[:kept] == had[:kept]
            assert len(got) == int(added.num_valid[row]) - 1 <= 11
    assert [paths(trees, row) for row in range(3)] == before


def test_bare_roots_get_chains_as_wide_as_the_longest():
    plan = plan_of(Certain([5, 6, 7]), Certain([]), Certain([8]))
    trees = with_certain(plan, None, TREE)
    assert trees.token_ids.shape[1] == 4
    assert [paths(trees, row) for row in range(3)] == [[(5,), (5, 6), (5, 6, 7)], [], [(8,)]]
    assert with_certain(plan_of(Certain([]), None), None, TREE) is None
    assert with_certain(plan_of(Certain([5]), speculation=False), None, TREE) is None


@pytest.mark.parametrize(
    ("drafted", "forbidden", "verified"),
    [
        ([9, 9], (), [(9,), (9, 9)]),
        ([9, 9], (9,), [(5,), (5, 6), (5, 6, 7)]),
        ([5, 6], (), [(5,), (5, 6), (5, 6, 7)]),
        ([5, 9], (), [(5,), (5, 6), (5, 6, 7)]),
    ],
    ids=["allowed", "forbidden", "begun", "begun and left"],
)
def test_a_chain_gives_way_to_what_is_certain_unless_it_begins_by_what_is_allowed(drafted, forbidden, verified):
    trees = tree_tensors([1], [[(token_id, node) for node, token_id in enumerate(drafted)]], 6)
    assert paths(with_certain(plan_of(Certain([5, 6, 7], forbidden)), trees, CHAIN), 0) == verified
