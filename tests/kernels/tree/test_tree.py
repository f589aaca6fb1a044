"""Masks, paths and walks of trees against slow, obviously right Python on random trees, padding included."""

import math
import random

import pytest
import torch

from tests.kernels.slow_trees import path_to_root, random_parents
from wingbeat.kernels.tree.reference import ancestor_mask, pack_mask, path_token_ids, unpack_mask, walk_tree

pytestmark = pytest.mark.few(4)


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 63, 64, 65, 130])
@pytest.mark.parametrize("shape", ["random", "chain", "star"])
def test_a_node_sees_itself_and_its_ancestors(num_nodes, shape):
    parents = random_parents(random.Random(num_nodes), 3, num_nodes, shape)
    expected = torch.zeros(3, num_nodes, num_nodes, dtype=torch.bool)
    depth = 0
    for req, row in enumerate(parents.tolist()):
        for node in range(num_nodes):
            path = path_to_root(row, node)
            expected[req, node, path] = True
            depth = max(depth, len(path) - 1)
    assert torch.equal(ancestor_mask(parents), expected)
    assert torch.equal(ancestor_mask(parents, max_depth=depth), expected)


def test_padding_sees_itself_and_is_not_seen():
    rng = random.Random(1)
    parents = random_parents(rng, 4, 20, "random")
    clean = ancestor_mask(parents)
    garbage = parents.clone()
    for req in range(4):
        for node in range(12, 20):
            garbage[req, node] = rng.randrange(-1, node)
    mask = ancestor_mask(garbage)
    assert torch.equal(mask[:, :12], clean[:, :12])
    assert not mask[:, :12, 12:].any()
    assert mask.diagonal(dim1=1, dim2=2).all()


@pytest.mark.parametrize("num_nodes", [1, 7, 63, 64, 65, 130])
def test_packed_masks_unpack_to_themselves(num_nodes):
    mask = torch.rand(3, num_nodes, num_nodes, generator=torch.Generator().manual_seed(0)) < 0.5
    words = pack_mask(mask)
    assert words.shape == (3, num_nodes, math.ceil(num_nodes / 64))
    assert words.dtype == torch.int64
    assert torch.equal(unpack_mask(words, num_nodes), mask)


def test_bit_b_of_word_w_is_column_64w_plus_b():
    mask = torch.zeros(1, 1, 130, dtype=torch.bool)
    mask[0, 0, [0, 5, 63, 64, 129]] = True
    assert pack_mask(mask).tolist() == [[[1 + 2**5 - 2**63, 1, 2]]]


def slow_walk(tokens: list[int], parents: list[int], num_valid: int, targets: list[int], max_path: int):
    nodes = [0]
    while len(nodes) < max_path:
        children = [
            child
            for child in range(1, num_valid)
            if parents[child] == nodes[-1] and tokens[child] == targets[nodes[-1]]
        ]
        if not children:
            break
        nodes.append(children[0])
    emitted = [targets[node] for node in nodes]
    rest = max_path - len(nodes)
    return nodes + [nodes[-1]] * rest, len(nodes), emitted + [0] * rest


@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize(("num_nodes", "max_path"), [(1, 1), (1, 4), (8, 1), (8, 3), (8, 12), (41, 7)])
def test_walk_follows_the_targets_choices(num_nodes, max_path, shape):
    rng = random.Random(num_nodes * 100 + max_path)
    num_reqs, vocab = 64, 2
    parents = random_parents(rng, num_reqs, num_nodes, shape)
    tokens, targets = (
        torch.tensor([[rng.randrange(vocab) + 1 for _ in range(num_nodes)] for _ in range(num_reqs)]) for _ in range(2)
    )
    num_valid = torch.tensor([rng.randrange(0, num_nodes + 1) for _ in range(num_reqs)])
    result = walk_tree(tokens, parents, num_valid, targets, max_path)
    for req in range(num_reqs):
        expected = slow_walk(
            tokens[req].tolist(), parents[req].tolist(), int(num_valid[req]), targets[req].tolist(), max_path
        )
        assert (result.nodes[req].tolist(), result.num_tokens[req].item(), result.token_ids[req].tolist()) == expected


@pytest.mark.parametrize("num_nodes", [1, 7, 65])
def test_a_nodes_path_is_its_tokens_up_to_the_roots_child(num_nodes):
    rng = random.Random(num_nodes)
    parents = random_parents(rng, 3, num_nodes, "random")
    tokens = torch.tensor([[rng.randrange(1000) for _ in range(num_nodes)] for _ in range(3)])
    paths = path_token_ids(tokens, parents, 5)
    for req, row in enumerate(parents.tolist()):
        for node in range(num_nodes):
            below_root = [int(tokens[req, step]) for step in path_to_root(row, node)[:-1]]
            assert paths[req, node].tolist() == (below_root + [-1] * 5)[:5]
