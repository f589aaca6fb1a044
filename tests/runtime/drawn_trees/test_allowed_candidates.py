"""Trees of fixed paths keep their shape where a grammar leaves fewer candidates than the paths need."""

import torch

from tests.runtime.drawn_trees.test_static_tree import VOCAB, logits_of, ranked
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.draft_rules.draft_rules import MaskedRoots
from wingbeat.runtime.drafters.growth import Growth, Roots
from wingbeat.runtime.drawn_trees.static_tree import StaticTree


def test_a_candidate_that_may_not_follow_keeps_its_place_and_weighs_nothing():
    growth = Growth(SpeculationConfig.of_tree(StaticTree.parse([[0], [1], [1, 0]])), torch.arange(VOCAB))
    zeros, roots = torch.zeros(1, dtype=torch.int64), torch.tensor([5])
    allowed = torch.zeros(1, 2, dtype=torch.int32)
    only = ranked(5)[0]
    allowed[0, only // 32] = 1 << only % 32
    start = Roots(
        zeros, roots, zeros.expand(2, 1), zeros.float(), zeros, MaskedRoots(allowed, torch.arange(VOCAB), None)
    )
    tree = growth.grow(start, logits_of(roots[:, None]), lambda level: logits_of(level.token_ids))
    assert tree.num_valid.tolist() == [4]
    assert tree.token_ids[0, 1] == only
    assert torch.isfinite(tree.scores).all()
    assert tree.scores[0, 2:].exp().max() < 1e-6
