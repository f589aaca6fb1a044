"""Trees as chains: each real node lies once behind exactly its ancestors."""

import random

from wingbeat.runtime.state.keeper import tree_paths


def ancestors(parents, node):
    path = [node]
    while path[-1]:
        path.append(parents[path[-1]])
    return path[::-1]


def test_every_node_lies_behind_its_ancestors():
    chance = random.Random(3)
    parents = [[-1, *(chance.randrange(node) for node in range(1, 9))] for _ in range(20)]
    num_valid = [chance.randrange(1, 10) for _ in parents]
    owners, nodes, places = tree_paths(parents, num_valid)
    length = len(nodes[0])
    for tree, (above, count) in enumerate(zip(parents, num_valid, strict=True)):
        for node in range(count):
            path, depth = divmod(places[tree][node], length)
            assert owners[path] == tree
            assert nodes[path][: depth + 1] == ancestors(above, node)
    leaves = [set(range(count)) - set(above[1:count]) for above, count in zip(parents, num_valid, strict=True)]
    assert len(owners) == sum(map(len, leaves))


def test_padding_makes_no_paths():
    assert tree_paths([[-1, 0, 1, 0, 0]], [3]).nodes == [[0, 1, 2]]
    assert tree_paths([[-1, 0, 0]], [1]).nodes == [[0]]
