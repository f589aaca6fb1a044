"""Growth of trees against EAGLE-2 over lists, ties and missing candidates included."""

import math
import random

import pytest
import torch

from wingbeat.kernels.tree.table import TreeTable

pytestmark = pytest.mark.few(4)


def slow_growth(levels, top_k: int, num_nodes: int, root: int):
    """EAGLE-2 over lists: levels[l] = (token_ids, log_probs), each [frontier][top_k]. Returns nodes and frontiers."""
    table = [{"token": root, "parent": -1, "score": 0.0, "depth": 0}]
    frontier, frontiers = [0], []
    for depth, (token_ids, log_probs) in enumerate(levels, start=1):
        entered = []
        for place, entry in enumerate(frontier):
            for token, log_prob in zip(token_ids[place], log_probs[place], strict=True):
                # Rounded to float32 at each step, as the table does.
                score = torch.tensor(table[entry]["score"]) + torch.tensor(log_prob)
                table.append({"token": token, "parent": entry, "score": score.item(), "depth": depth, "place": place})
                entered.append(len(table) - 1)
        frontier = sorted(entered, key=lambda entry: (-table[entry]["score"], entry))[:top_k]
        frontiers.append([(entry, table[entry]["token"], table[entry]["place"]) for entry in frontier])
    ranked = sorted(range(1, len(table)), key=lambda entry: (-table[entry]["score"], entry))
    kept = sorted(entry for entry in ranked[: num_nodes - 1] if table[entry]["score"] > -math.inf)
    number = {entry: place for place, entry in enumerate([0, *kept])}
    nodes = [
        (table[e]["token"], number.get(table[e]["parent"], -1), table[e]["depth"], table[e]["score"]) for e in number
    ]
    return nodes, frontiers


def random_levels(rng: random.Random, num_reqs: int, top_k: int, steps: int, kind: str):
    """Per level (token_ids, log_probs) [num_reqs, frontier, top_k]; the kinds set how often scores collide."""

    def log_prob() -> float:
        if kind == "tied":
            return rng.choice([0.0, 0.0, -0.5, -1.0])
        if kind == "gaps" and rng.random() < 0.4:
            return -math.inf
        return -rng.expovariate(1.0)

    for level in range(steps):
        shape = (num_reqs, 1 if level == 0 else top_k, top_k)
        log_probs = torch.tensor([log_prob() for _ in range(math.prod(shape))]).reshape(shape)
        yield torch.tensor([rng.randrange(1000) for _ in range(math.prod(shape))]).reshape(shape), log_probs


@pytest.mark.parametrize("kind", ["distinct", "tied", "gaps"])
@pytest.mark.parametrize("num_nodes", [1, 2, 6, 16, 200])
@pytest.mark.parametrize(("top_k", "steps"), [(1, 1), (1, 5), (2, 3), (4, 1), (4, 4)])
def test_growth_is_eagle2(top_k, steps, num_nodes, kind):
    num_reqs = 5
    table = TreeTable(num_reqs, top_k, steps, "cpu")
    roots = torch.arange(num_reqs) + 5000
    for seed in range(2):  # the second tree reuses the table
        levels = list(random_levels(random.Random(seed), num_reqs, top_k, steps, kind))
        frontiers = [table.add_level(level, *candidates) for level, candidates in enumerate(levels)]
        tree = table.finalize(roots, num_nodes)
        assert all(column.shape == (num_reqs, num_nodes) for column in tree[:4])
        for req in range(num_reqs):
            mine = [(tokens[req].tolist(), log_probs[req].tolist()) for tokens, log_probs in levels]
            nodes, expected_frontiers = slow_growth(mine, top_k, num_nodes, int(roots[req]))
            for frontier, expected in zip(frontiers, expected_frontiers, strict=True):
                columns = (frontier.table_index, frontier.token_ids, frontier.frontier_parent)
                found = zip(*(column[req].tolist() for column in columns), strict=True)
                assert list(found) == expected
            assert tree.num_valid[req] == len(nodes)
            padded = nodes + [(0, 0, 0, -math.inf)] * (num_nodes - len(nodes))
            assert list(zip(*(column[req].tolist() for column in tree[:4]), strict=True)) == padded


@pytest.mark.parametrize("kind", ["distinct", "tied", "gaps"])
def test_grown_trees_are_closed_and_ordered(kind):
    num_reqs, num_nodes = 50, 24
    table = TreeTable(num_reqs, 5, 6, "cpu")
    for level, candidates in enumerate(random_levels(random.Random(3), num_reqs, 5, 6, kind)):
        table.add_level(level, *candidates)
    tree = table.finalize(torch.arange(num_reqs), num_nodes)
    for req in range(num_reqs):
        for node in range(1, int(tree.num_valid[req])):
            parent = int(tree.parents[req, node])
            assert 0 <= parent < node
            assert tree.depths[req, node] == tree.depths[req, parent] + 1
            assert tree.scores[req, node] <= tree.scores[req, parent]


def test_broken_candidates_cannot_outrank_their_parents():
    table = TreeTable(1, 2, 2, "cpu")
    table.add_level(0, torch.tensor([[[1, 2]]]), torch.tensor([[[-1.0, math.nan]]]))
    table.add_level(1, torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[1e9, math.nan], [math.inf, 0.0]]]))
    tree = table.finalize(torch.tensor([9]), 4)
    assert tree.num_valid.item() == 3
    assert tree.token_ids[0].tolist() == [9, 1, 3, 0]
    assert tree.parents[0].tolist() == [-1, 0, 1, 0]


def test_stopping_early_keeps_nothing_of_an_earlier_tree():
    table = TreeTable(2, 3, 3, "cpu")
    full, short = (list(random_levels(random.Random(seed), 2, 3, 3, "distinct")) for seed in (1, 2))
    for level, candidates in enumerate(full):
        table.add_level(level, *candidates)
    table.add_level(0, *short[0])
    tree = table.finalize(torch.tensor([7, 8]), 10)
    assert tree.num_valid.tolist() == [4, 4]
    assert torch.equal(tree.token_ids[:, 1:4], short[0][0][:, 0])


def test_misshapen_candidates_are_refused():
    table = TreeTable(2, 3, 3, "cpu")
    with pytest.raises(ValueError, match="without the level before"):
        table.add_level(1, torch.zeros(2, 3, 3, dtype=torch.int64), torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match="shape"):
        table.add_level(0, torch.zeros(2, 3, 3, dtype=torch.int64), torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match="root"):
        table.finalize(torch.zeros(2, dtype=torch.int64), 0)
