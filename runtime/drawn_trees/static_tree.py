"""`StaticTree`: a tree of user-defined shape, given by the ranks of the candidates to draft at every node."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

EXAMPLE = "[[0], [1], [0, 0], [0, 1]]"
MOST_NODES, MOST_DEPTH, MOST_RANK = 1023, 256, 255
Path = tuple[int, ...]


class TreeLevel(NamedTuple):
    """Nodes of one depth, in the order of their paths."""

    parents: tuple[int, ...]
    """Index of each node's parent among the nodes of the previous level; 0 for children of the root."""
    ranks: tuple[int, ...]
    """Rank of each node among its parent's continuations; 0 is the likeliest."""
    expanded: tuple[int, ...]
    """Indices of the nodes that have children."""


class StaticTree(NamedTuple):
    """Tree given by its nodes' paths of child ranks, ordered by depth and then rank, as in Medusa and EAGLE-1."""

    paths: tuple[Path, ...]

    @classmethod
    def parse(cls, given: Any) -> "StaticTree":
        """Parse a list of paths of child ranks, in any order, or its JSON.

        Raises:
            ValueError: the value is not a tree; the message names the path, and the missing or wrong part.
        """
        if isinstance(given, str):
            with suppress(ValueError, RecursionError):
                given = json.loads(given)
        if not isinstance(given, Iterable) or isinstance(given, str | bytes | dict):
            raise ValueError(f"is {given!r}: give a number, or a tree as paths of ranks such as {EXAMPLE}")
        paths = [_path(one) for one in given]
        if not paths:
            raise ValueError("is a tree without paths: drafter 'none' switches drafting off")
        known: set[Path] = {()}
        for path in sorted(paths, key=lambda path: (len(path), path)):
            if path in known:
                raise ValueError(f"is a tree that has the path {list(path)} twice")
            if path[:-1] not in known:
                raise ValueError(f"is a tree with the path {list(path)} but without its parent {list(path[:-1])}")
            known.add(path)
        if len(paths) > MOST_NODES:
            raise ValueError(f"is a tree of {len(paths)} paths: use at most {MOST_NODES}")
        return cls(tuple(sorted(paths, key=lambda path: (len(path), path))))

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.paths[-1])

    @property
    def width(self) -> int:
        """The larger of two numbers: candidates per expanded node, and nodes expanded at a level (maximum)."""
        return max(1 + max(map(max, self.paths)), *(len(level.expanded) for level in self.levels()))

    def levels(self) -> list[TreeLevel]:
        """Return the levels of the tree, starting with the root's children."""
        found, before = [], [()]
        inner = {path[:-1] for path in self.paths}
        for depth in range(1, self.depth + 1):
            nodes = [path for path in self.paths if len(path) == depth]
            number = {path: index for index, path in enumerate(before)}
            parents = tuple(number[path[:-1]] for path in nodes)
            expanded = tuple(index for index, path in enumerate(nodes) if path in inner)
            found.append(TreeLevel(parents, tuple(path[-1] for path in nodes), expanded))
            before = nodes
        return found


def _path(given: Any) -> Path:
    ranks = given if isinstance(given, list | tuple) else []
    whole = all(isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank <= MOST_RANK for rank in ranks)
    if not ranks or not whole or len(ranks) > MOST_DEPTH:
        raise ValueError(
            f"is a tree with the path {given!r}: a path is a list of 1 to {MOST_DEPTH} ranks from 0 to {MOST_RANK}"
        )
    return tuple(ranks)


parse_tree = StaticTree.parse
