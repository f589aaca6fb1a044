"""Trees that a user has drawn: what is refused, and that exactly the drawn nodes are drafted."""

import pytest
import torch

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.growth import Growth, Level, Roots
from wingbeat.runtime.drawn_trees.static_tree import StaticTree

PATHS = [[0], [2], [0, 1], [2, 0], [2, 0, 0], [2, 0, 3]]
VOCAB = 50


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "is a tree without paths"),
        ([[0], [0, 1, 1]], r"with the path \[0, 1, 1\] but without its parent \[0, 1\]"),
        ([[0], [1], [0]], r"has the path \[0\] twice"),
        ([[-1]], r"the path \[-1\]: a path is a list of 1 to 256 ranks from 0 to 255"),
        ([[True]], "a path is a list"),
        ([[]], r"the path \[\]"),
        ([0, 1], "the path 0: a path is a list"),
        ("nonsense", "give a number, or a tree as paths of ranks"),
        ("[[0], [0, 0]", "give a number, or a tree as paths of ranks"),
        ("[" * 100_000, "give a number, or a tree as paths of ranks"),
        ([[rank, other] for rank in range(40) for other in range(40)], "with the path"),
        ([[0] * depth for depth in range(1, 258)], "a path is a list of 1 to 256 ranks"),
        (
            [*([rank] for rank in range(40)), *([rank, other] for rank in range(40) for other in range(40))],
            "1640 paths",
        ),
    ],
)
def test_what_is_no_tree_is_refused_by_what_is_wrong_with_it(given, message):
    with pytest.raises(ValueError, match=message):
        StaticTree.parse(given)


def test_numbers_follow_from_a_tree():
    shape = SpeculationConfig.default("cuda", draft_top_k=PATHS)
    assert (shape.draft_steps, shape.draft_top_k, shape.num_nodes, shape.max_path) == (3, 4, 7, 4)
    assert not SpeculationConfig.default("cuda", draft_top_k=PATHS, adaptive=False).adaptive
    assert AppConfig(draft_top_k="[[0], [0, 0]]").engine_config().speculation.draft_tree.paths == ((0,), (0, 0))
    with pytest.raises(ValueError, match="leave draft_steps out"):
        AppConfig(draft_top_k=PATHS, draft_steps=3)


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_earlier_text_is_drafted_in_no_tree(drafter):
    with pytest.raises(ValueError, match="ranks no candidates"):
        AppConfig(draft_top_k=PATHS, drafter=drafter)


def ranked(parent: int) -> list[int]:
    """The four likeliest next tokens of a toy model, in order."""
    return [(7 * parent + 11 * rank + 1) % VOCAB for rank in range(4)]


def logits_of(token_ids: torch.Tensor) -> torch.Tensor:
    logits = torch.full((*token_ids.shape, VOCAB), -50.0)
    for row, column in torch.cartesian_prod(*map(torch.arange, token_ids.shape)).tolist():
        for rank, token in enumerate(ranked(int(token_ids[row, column]))):
            logits[row, column, token] = -float(rank)
    return logits


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_the_drawn_nodes_are_drafted_each_seeing_its_ancestors(depth: int, packed: bool):
    growth = Growth(SpeculationConfig.of_tree(StaticTree.parse(PATHS)), torch.arange(VOCAB), packed)
    roots, seen = torch.tensor([5, 9]), []

    def expand(level: Level) -> torch.Tensor:
        seen.append(level)
        return logits_of(level.token_ids)

    zeros = torch.zeros(2, dtype=torch.int64)
    start = Roots(zeros, roots, zeros.expand(depth, 2), zeros.float(), zeros)
    for _ in range(2):  # twice, so that the second tree is written to the memory of the first
        tree = growth.grow(start, logits_of(roots[:, None]), expand)
    paths = sorted((path for path in PATHS if len(path) <= depth), key=lambda path: (len(path), path))
    assert tree.num_valid.tolist() == [1 + len(paths)] * 2
    number = {(): 0} | {tuple(path): index for index, path in enumerate(paths, 1)}
    for row, root in enumerate(roots.tolist()):
        token = {(): root}
        for path in map(tuple, paths):
            token[path] = ranked(token[path[:-1]])[path[-1]]
        assert tree.token_ids[row, : len(number)].tolist() == list(token.values())
        assert tree.parents[row, 1 : len(number)].tolist() == [number[path[:-1]] for path in list(number)[1:]]
        scores = tree.scores[row].tolist()
        assert all(scores[number[path]] <= scores[number[path[:-1]]] for path in list(number)[1:])
    assert tree.depths[0].tolist() == [0, *map(len, paths), *[0] * (len(PATHS) - len(paths))]
    for level in seen[:1]:
        assert level.token_ids[0, :2].tolist() == [ranked(5)[0], ranked(5)[2]], "those that are expanded"
