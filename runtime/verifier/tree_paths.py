"""Token trees as the chains that they are made of: what a recurrence, which cannot branch, runs over."""

from typing import NamedTuple


class TreePaths(NamedTuple):
    """Paths from the roots of several trees to their leaves, tree by tree."""

    owners: list[int]
    """By path: its tree."""
    nodes: list[list[int]]
    """By path: its nodes, the root first; shorter paths repeat their last one."""
    places: list[list[int]]
    """By tree and node: where it occurs in the flattened `nodes`; 0 for padding."""


def tree_paths(parents: list[list[int]], num_valid: list[int]) -> TreePaths:
    """Take trees apart.

    Args:
        parents: [num_trees, num_nodes], each before its children.
        num_valid: nodes of each tree that are no padding.
    """
    owners: list[int] = []
    paths: list[list[int]] = []
    for tree, (above, count) in enumerate(zip(parents, num_valid, strict=True)):
        inner = set(above[1:count])
        for leaf in (node for node in range(count) if node not in inner):
            path = [leaf]
            while path[-1]:
                path.append(above[path[-1]])
            owners.append(tree)
            paths.append(path[::-1])
    length = max(map(len, paths))
    places = [[0] * len(above) for above in parents]
    for index, (tree, path) in enumerate(zip(owners, paths, strict=True)):
        for depth, node in enumerate(path):
            places[tree][node] = index * length + depth
    return TreePaths(owners, [path + path[-1:] * (length - len(path)) for path in paths], places)
