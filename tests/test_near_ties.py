"""Trees and texts of two implementations may differ by near-ties, and by nothing else."""

import pytest
import torch

from tests.near_ties import Written, check_same_drafts, check_same_texts, check_same_trees, same_drafts, same_text
from wingbeat.runtime.protocol.messages import TokenTree

TREE = {(1,): -1.0, (2,): -2.0, (1, 3): -1.5, (1, 4): -2.5, (2, 5): -3.0}


def changed(*gone, **scores):
    """TREE without some paths, and with others: `_1_3=-1.5` is the path (1, 3)."""
    new = {tuple(int(token) for token in path.split("_")[1:]): score for path, score in scores.items()}
    return {path: score for path, score in TREE.items() if path not in gone} | new


NEAR_TIES = {
    "a score that rounds otherwise": changed(_1_3=-1.5004),
    "a sibling as likely": changed((1, 4), _1_6=-2.5002),
    "a node as likely as the last of the tree": changed((2, 5), _1_7=-2.9996),
    "behind a sibling as likely, another way": changed((1, 3), _1_6=-1.5, _1_6_8=-2.7),
    "another node expanded that is as likely": changed((2, 5), _3=-2.0002, _3_9=-2.8),
}
DIFFERENCES = {
    "a score": changed(_1_3=-1.502),
    "a sibling that is less likely": changed((1, 4), _1_6=-2.6),
    "a node missing within the tree": changed((1, 4)),
    "the likeliest child missing": changed((1,), (1, 3), (1, 4)),
    "another node expanded that is less likely": changed((2, 5), _3=-2.2, _3_9=-2.8),
    "nothing at all": {},
}


@pytest.mark.parametrize("name", NEAR_TIES)
def test_near_ties_are_not_judged(name):
    other = NEAR_TIES[name]
    assert same_drafts(other, TREE) is (other.keys() == TREE.keys())
    assert same_drafts(TREE, other) is (other.keys() == TREE.keys())


@pytest.mark.parametrize("name", DIFFERENCES)
def test_all_else_is_a_difference(name):
    with pytest.raises(AssertionError):
        same_drafts(DIFFERENCES[name], TREE)
    with pytest.raises(AssertionError):
        same_drafts(TREE, DIFFERENCES[name])


def test_near_ties_in_more_than_a_tenth_of_the_trees_are_a_difference():
    expected = dict.fromkeys(range(20), TREE)
    other = NEAR_TIES["a sibling as likely"]
    check_same_drafts(expected | {0: other, 1: other}, expected, at_least=20)
    with pytest.raises(AssertionError):
        check_same_drafts(expected | dict.fromkeys(range(3), other), expected, at_least=20)
    with pytest.raises(AssertionError):
        check_same_drafts(expected, expected, at_least=21)


ROOT = (9, -1, 0, 0.0)
NODES = [ROOT, (1, 0, 1, -1.0), (2, 0, 1, -1.4), (3, 1, 2, -1.5), (4, 1, 2, -2.5), (5, 2, 2, -3.0)]
TIED = [ROOT, (1, 0, 1, -1.0), (2, 0, 1, -1.0005), *NODES[3:]]
CHANGED_PLACES = [ROOT, (2, 0, 1, -1.0005), (1, 0, 1, -1.0), (5, 1, 2, -3.0), (3, 2, 2, -1.5), (4, 2, 2, -2.5)]
NOT_THE_SAME = {
    "siblings that are not as likely have changed places": [*NODES[:3], NODES[4], NODES[3], NODES[5]],
    "children of a node that is less likely come first": [*NODES[:3], NODES[5], *NODES[3:5]],
    "another root": [(8, -1, 0, 0.0), *NODES[1:]],
    "another depth": [*NODES[:5], (5, 2, 1, -3.0)],
    "another parent": [*NODES[:3], (3, 2, 2, -1.5), *NODES[4:]],
    "a node less": NODES[:5],
}


def tree_of(*rows, padding=(0, 0, 0, float("-inf"))):
    """A batch; every row is as wide as NODES and one more."""
    padded = [[*row, *[padding] * (len(NODES) + 1 - len(row))] for row in rows]
    columns = (torch.tensor([[node[column] for node in row] for row in padded]) for column in range(4))
    return TokenTree(*columns, torch.tensor(list(map(len, rows))))


def test_nodes_that_are_as_likely_change_places():
    check_same_trees(tree_of(TIED, CHANGED_PLACES), tree_of(CHANGED_PLACES, TIED))
    with pytest.raises(AssertionError):
        check_same_trees(tree_of(TIED, CHANGED_PLACES), tree_of(CHANGED_PLACES, TIED), gap=1e-4)


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_other_trees_are_a_difference(name):
    check_same_trees(tree_of(NODES), tree_of(NODES))
    for trees in ((NOT_THE_SAME[name], NODES), (NODES, NOT_THE_SAME[name])):
        with pytest.raises(AssertionError):
            check_same_trees(*map(tree_of, trees))


def test_what_lies_behind_a_tree_is_compared():
    with pytest.raises(AssertionError):
        check_same_trees(tree_of(NODES), tree_of(NODES, padding=(7, 0, 0, float("-inf"))))


TEXT = Written([4, 5, 6, 7], lambda place: {4 + place: 1.0, 1: 0.9995, 2: 0.9})


def test_texts_are_compared_up_to_a_near_tie():
    assert same_text([4, 5, 6, 7], TEXT)
    assert not same_text([4, 1, 9, 9], TEXT)
    for text in ([4, 2, 6, 7], [4, 3, 6, 7], [4, 5, 6], [4, 5, 6, 7, 8]):
        with pytest.raises(AssertionError):
            same_text(text, TEXT)


def test_near_ties_in_more_than_a_tenth_of_the_texts_are_a_difference():
    same, other = [4, 5, 6, 7], [4, 1, 6, 7]
    check_same_texts([other, *[same] * 9], [TEXT] * 10)
    with pytest.raises(AssertionError):
        check_same_texts([other, other, *[same] * 8], [TEXT] * 10)
