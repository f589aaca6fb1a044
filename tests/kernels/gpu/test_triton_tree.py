"""Tree kernels against their reference: the same walks, masks and paths, padding included."""

import random

import pytest
import torch

pytest.importorskip("triton")

from wingbeat.kernels.gpu.tree import walk as triton_tree
from wingbeat.kernels.tree import reference as tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU")]


pytestmark = [pytest.mark.few(3), pytest.mark.usefixtures("poisoned_memory")]


def random_tree(num_reqs: int, num_nodes: int, vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Trees, targets and how many nodes count; padding has any parent below it, -1 included."""
    rng = random.Random(seed)
    rows = range(num_reqs)
    parents = [[-1] + [rng.randrange(node) for node in range(1, num_nodes)] for _ in rows]
    num_valid = [rng.randrange(0, num_nodes + 1) for _ in rows]
    for row, count in zip(parents, num_valid, strict=True):
        for node in range(max(count, 1), num_nodes):
            row[node] = rng.randrange(-1, node)
    tokens, targets = ([[rng.randrange(1, vocab_size + 1) for _ in range(num_nodes)] for _ in rows] for _ in range(2))
    named = {"token_ids": tokens, "parents": parents, "num_valid": num_valid, "target_token_ids": targets}
    return {name: torch.tensor(value) for name, value in named.items()}


def check_walk(num_reqs: int, num_nodes: int, max_path: int) -> None:
    inputs = random_tree(num_reqs, num_nodes, 2, num_nodes)
    expected = tree.walk_tree(**inputs, max_path=max_path)
    actual = triton_tree.walk_tree(**{name: value.to(DEVICE) for name, value in inputs.items()}, max_path=max_path)
    for name, column in actual._asdict().items():
        assert torch.equal(column.cpu(), getattr(expected, name)), name


def check_ancestors(num_reqs: int, num_nodes: int, max_depth: int | None) -> None:
    inputs = random_tree(num_reqs, num_nodes, 9, num_nodes)
    parents, token_ids = inputs["parents"], inputs["token_ids"]
    expected = tree.ancestor_mask(parents, max_depth)
    mask = triton_tree.ancestors(parents.to(DEVICE), max_depth, pack=False)
    assert mask.dtype == torch.bool
    assert torch.equal(mask.cpu(), expected)
    words = triton_tree.ancestors(parents.to(DEVICE), max_depth, pack=True)
    assert torch.equal(words.cpu(), tree.pack_mask(expected))
    assert torch.equal(words.cpu(), tree.ancestor_words(parents, max_depth))
    paths = triton_tree.path_token_ids(token_ids.to(DEVICE), parents.to(DEVICE), 4)
    assert torch.equal(paths.cpu(), tree.path_token_ids(token_ids, parents, 4))


@pytest.mark.parametrize(("num_nodes", "max_path"), [(1, 1), (1, 3), (9, 1), (9, 4), (41, 12)])
def test_walks_are_the_references(num_nodes, max_path):
    check_walk(12, num_nodes, max_path)


@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, None), (7, 0), (7, 3), (65, 6), (130, 9)])
def test_masks_and_paths_are_the_references(num_nodes, max_depth):
    check_ancestors(2, num_nodes, max_depth)


def test_no_requests_need_no_launch():
    none = torch.zeros(0, 5, dtype=torch.int64, device=DEVICE)
    assert triton_tree.walk_tree(none, none, none[:, 0], none, 3).nodes.shape == (0, 3)
    assert triton_tree.ancestors(none, None, pack=False).shape == (0, 5, 5)
    assert triton_tree.path_token_ids(none, none, 2).shape == (0, 5, 2)


@pytest.mark.parametrize(("num_reqs", "num_nodes"), [(1, 60), (256, 64), (16, 513)])
class TestOnGpu:
    pytestmark = gpu

    def test_walks_and_masks_at_real_shapes(self, num_reqs, num_nodes):
        check_walk(num_reqs, num_nodes, 9)
        check_ancestors(num_reqs, num_nodes, 12)
