"""Trees and texts of two implementations, compared as far as their scores settle them.

Two implementations add the same numbers in another order, or round them otherwise, so that candidates whose scores lie
closer than the rounding may change places. A comparison names the gap below which it does not judge; whatever is
decided by more has to be equal. Texts need no such gap where every token of the reference beat its rival by more than
`ROUNDING`, which the references of tests.runtime check when they are made; other texts are compared up to the first
token whose rival was as likely.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from wingbeat.runtime.protocol.messages import TokenTree

ROUNDING = 1e-4
"""By how much logits of order 1 differ at most between two float32 implementations of a model of a few layers."""
GAP = 1e-3
"""By how much scores of float32 trees, which add up log-probabilities along a path, differ at most."""

FLIPPED = 2e-2
"""By how much logits of order 1 differ at most where keys or values of eight bits were rounded to other neighbours."""

Path = tuple[int, ...]
"""Token ids from the root's child on."""
Drafted = Mapping[Path, float]
"""Score of each drafted node, by its path."""


def drafted_paths(tree: TokenTree, row: int) -> Drafted:
    """The drafted nodes of a row, in their order."""
    token_ids, parents, depths, scores = (part[row].tolist() for part in tree[:4])
    paths: list[Path] = [()]
    for node in range(1, int(tree.num_valid[row])):
        paths.append((*paths[parents[node]], token_ids[node]))
        assert depths[node] == len(paths[node]), f"node {node} is said to be at depth {depths[node]}"
    nodes = {path: scores[node] for node, path in enumerate(paths) if node > 0}
    assert len(nodes) == len(paths) - 1, "two siblings have one token"
    return nodes


def likeliest_child(drafted: Drafted) -> Drafted:
    """The root's child with the highest score, alone."""
    best = max((path for path in drafted if len(path) == 1), key=lambda path: drafted[path])
    return {best: drafted[best]}


def same_drafts(found: Drafted, expected: Drafted, gap: float = GAP) -> bool:
    """Whether two trees have the same nodes; raises AssertionError where they differ by more than near-ties.

    Nodes of both trees have scores within `gap` of each other. A node of one tree alone has to be, within `gap`, as
    likely as what took its place: a sibling, the least likely node of the other tree, or, where its parent was not
    expanded there, the parent as likely as a node that was expanded in the parent's place. A tree that went another
    way behind a sibling or an expanded node holds other nodes from there on, which are not compared.
    """
    for path in found.keys() & expected.keys():
        assert abs(found[path] - expected[path]) <= gap, (path, found[path], expected[path])
    turned, unexplained = False, []
    for own, other in ((found, expected), (expected, found)):
        for path in own.keys() - other.keys():
            if path[:-1] and path[:-1] not in other:
                continue  # its parent explains it, or does not
            if _took_another_way(path, own, other, gap):
                turned = True
            elif not other or abs(own[path] - min(other.values())) > gap:
                unexplained.append((path, own[path]))
    assert turned or not unexplained, f"in one tree alone, and not for a near-tie: {unexplained}"
    return found.keys() == expected.keys()


def _took_another_way(path: Path, own: Drafted, other: Drafted, gap: float) -> bool:
    """Whether a sibling stands in the other tree alone, or a node was expanded there alone in place of the parent,
    that is as likely."""
    parent = path[:-1]
    siblings = _children(other)[parent] - _children(own)[parent]
    if any(abs(own[path] - other[sibling]) <= gap for sibling in siblings):
        return True
    if not parent or _children(other)[parent]:
        return False
    expanded = {one for one in _children(other) if len(one) == len(parent) and not _children(own)[one]}
    return any(abs(own[parent] - other[one]) <= gap for one in expanded)


def _children(tree: Drafted) -> defaultdict[Path, set[Path]]:
    children: defaultdict[Path, set[Path]] = defaultdict(set)
    for path in tree:
        children[path[:-1]].add(path)
    return children


def check_same_drafts(
    found: Mapping[Hashable, Drafted], expected: Mapping[Hashable, Drafted], at_least: int, gap: float = GAP
) -> None:
    """Trees under the same keys are the same, up to near-ties in at most a tenth of the trees, rounded up.

    Args:
        at_least: keys that both must have.
    """
    both = found.keys() & expected.keys()
    assert len(both) >= at_least
    others = [key for key in both if not same_drafts(found[key], expected[key], gap)]
    assert len(others) <= -(-len(both) // 10), others


def check_same_trees(found: TokenTree, expected: TokenTree, gap: float = GAP) -> None:
    """Trees of one batch are the same, up to near-ties in at most a tenth of them, rounded up: roots, nodes, their
    order, and whatever stands in the place of nodes that are not there."""
    assert found.num_valid.tolist() == expected.num_valid.tolist()
    settled = torch.arange(expected.token_ids.shape[1]) >= expected.num_valid[:, None]
    settled[:, 0] = True
    for name in ("token_ids", "parents", "depths", "scores"):
        one, other = (getattr(tree, name) for tree in (found, expected))
        assert one.shape == other.shape, name
        assert one[settled].tolist() == other[settled].tolist(), name
    ours, theirs = ({row: drafted_paths(tree, row) for row in range(len(settled))} for tree in (found, expected))
    for row, drafted in ours.items():
        _check_order(drafted, theirs[row], gap)
    check_same_drafts(ours, theirs, len(settled), gap)


def _check_order(found: Drafted, expected: Drafted, gap: float) -> None:
    """Nodes of both trees change places within a level alone, and where the scores by which they are ranked are within
    `gap`: their own among siblings, else their parents'."""
    places = {path: place for place, path in enumerate(expected)}
    for one, other in pairwise(path for path in found if path in expected):
        if places[one] > places[other]:
            ranked = (one, other) if one[:-1] == other[:-1] else (one[:-1], other[:-1])
            assert len(one) == len(other), (one, other)
            assert abs(expected[ranked[0]] - expected[ranked[1]]) <= gap, (one, other)


class Written(NamedTuple):
    """A text, and by what its tokens were chosen."""

    token_ids: Sequence[int]
    scores_at: Callable[[int], Mapping[int, float]]
    """Scores of the likeliest tokens at a position, including the text's own token, which has the highest."""


def same_text(found: Sequence[int], expected: Written, gap: float = GAP) -> bool:
    """Whether two texts are equal; raises AssertionError where they differ by more than a near-tie.

    The first token that differs has to be as likely, within `gap`, as the expected one; later tokens are not compared.
    """
    assert len(found) == len(expected.token_ids)
    for place, (token, wanted) in enumerate(zip(found, expected.token_ids, strict=True)):
        if token != wanted:
            scores = expected.scores_at(place)
            assert token in scores, f"token {token} in place {place} is none of the likeliest"
            assert abs(scores[wanted] - scores[token]) <= gap, (place, token, scores[token], wanted, scores[wanted])
            return False
    return True


def check_same_texts(found: Sequence[Sequence[int]], expected: Sequence[Written], gap: float = GAP) -> None:
    """Texts of one batch are the same, up to near-ties in at most a tenth of them, rounded up."""
    others = [place for place, pair in enumerate(zip(found, expected, strict=True)) if not same_text(*pair, gap)]
    assert len(others) <= -(-len(expected) // 10), others
