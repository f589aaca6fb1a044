"""Tree kernels against their reference: the same frontiers, trees, walks and masks, ties and padding included."""

import random

import pytest
import torch

pytest.importorskip("triton")

from wingbeat.kernels import tree, triton_tree
from wingbeat.kernels.tree import Coupling, Frontier, TreeTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU")]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class KernelTable(TreeTable):
    """A table whose growth goes through the kernels on any device, as a CUDA table's does by itself."""

    def grow(self, level: int, token_ids: torch.Tensor, log_probs: torch.Tensor) -> Frontier:
        previous = None if level == 0 else self._frontier
        table = (self._token_ids, self._parents, self._scores)
        self._frontier = triton_tree.add_level(token_ids, log_probs, previous, table, self.level_start(level))
        return self._frontier

    def finish(self, roots: torch.Tensor, num_nodes: int, positions: torch.Tensor | None) -> tree.PackedTree:
        return self._finalize_on_gpu(roots, num_nodes, positions)


def random_levels(num_reqs: int, top_k: int, steps: int, seed: int):
    """Per level (token_ids, log_probs) [num_reqs, frontier, top_k]: distinct, tied and broken scores by turns."""
    generator = torch.Generator().manual_seed(seed)
    for level in range(steps):
        shape = (num_reqs, 1 if level == 0 else top_k, top_k)
        log_probs = -torch.rand(shape, generator=generator)
        log_probs[1::3] = (log_probs[1::3] * 3).round() / 2
        draw = torch.rand(shape, generator=generator)
        draw[::3] = draw[1::3] = 1.0
        for value, share in ((float("nan"), 0.1), (float("-inf"), 0.5), (3.0, 0.6), (float("inf"), 0.65)):
            log_probs[(draw < share) & (draw >= share - 0.1)] = value
        yield torch.randint(0, 1000, shape, generator=generator), log_probs


def check_growth(num_reqs: int, top_k: int, steps: int, num_nodes: int) -> None:
    expected_table, table = TreeTable(num_reqs, top_k, steps, "cpu"), KernelTable(num_reqs, top_k, steps, DEVICE)
    roots, positions = torch.arange(num_reqs) + 5000, torch.arange(num_reqs) * 3 + 17
    # The second tree reuses the table and stops early.
    for tree_number, levels in enumerate((steps, max(steps - 1, 1))):
        for level, candidates in enumerate(random_levels(num_reqs, top_k, levels, tree_number)):
            expected = expected_table.add_level(level, *candidates)
            frontier = table.grow(level, *(part.to(DEVICE) for part in candidates))
            for name, column in frontier._asdict().items():
                assert torch.equal(column.cpu(), getattr(expected, name)), f"level {level}: {name}"
        packed = expected_table.finalize_packed(roots, num_nodes, positions)
        actual = table.finish(roots.to(DEVICE), num_nodes, positions.to(DEVICE))
        for name, column in actual.tree._asdict().items():
            assert torch.equal(column.cpu(), getattr(packed.tree, name)), name
        assert torch.equal(actual.ancestor_words.cpu(), packed.ancestor_words)
        assert torch.equal(actual.positions.cpu(), packed.positions)
    plain = table.finish(roots.to(DEVICE), num_nodes, None)
    for name, column in plain.tree._asdict().items():
        assert torch.equal(column.cpu(), getattr(packed.tree, name)), name


@pytest.mark.parametrize(
    ("top_k", "steps", "num_nodes"), [(3, 3, 7), (1, 4, 5), (2, 2, 1), (4, 2, 70)], ids=["tree", "chain", "root", "pad"]
)
def test_growth_is_the_references(top_k, steps, num_nodes):
    check_growth(3, top_k, steps, num_nodes)


def test_words_beyond_the_first_are_the_references():
    check_growth(2, 6, 5, 90)


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


def random_candidates(num_reqs: int, width: int, vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    return {
        # Distinct values: which of two equal ones comes first is open in the reference.
        "logits": torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_reqs * width)])
        .view(num_reqs, width, vocab_size)
        .float()
        .mul_(20 / vocab_size),
        "draft_token_ids": torch.randperm(vocab_size * 2, generator=generator)[:vocab_size].sort().values,
    }


def random_coupling(num_reqs: int) -> Coupling:
    temperatures = torch.linspace(0, 1.4, num_reqs) if num_reqs > 1 else torch.ones(1)
    return Coupling(temperatures, torch.arange(num_reqs) * 7919, torch.arange(num_reqs) + 30)


def check_candidates(num_reqs: int, width: int, vocab_size: int, top_k: int, *, coupled: bool) -> None:
    inputs = random_candidates(num_reqs, width, vocab_size)
    coupling = random_coupling(num_reqs) if coupled else None
    moved = None if coupling is None else Coupling(*(column.to(DEVICE) for column in coupling))
    expected = tree.top_candidates(**inputs, top_k=top_k, coupling=coupling)
    actual = triton_tree.top_candidates(
        **{name: value.to(DEVICE) for name, value in inputs.items()}, top_k=top_k, coupling=moved
    )
    assert torch.equal(actual.token_ids.cpu(), expected.token_ids)
    torch.testing.assert_close(actual.log_probs.cpu(), expected.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
@pytest.mark.parametrize(("vocab_size", "top_k"), [(7, 7), (63, 3), (150, 5), (1, 1)])
def test_candidates_are_the_references(vocab_size, top_k, coupled, monkeypatch):
    monkeypatch.setattr(triton_tree, "_CANDIDATE_TILE", 64)
    check_candidates(3, 2, vocab_size, top_k, coupled=coupled)


def test_equal_candidates_come_in_order_and_missing_ones_are_marked(monkeypatch):
    monkeypatch.setattr(triton_tree, "_CANDIDATE_TILE", 16)
    logits = torch.zeros(1, 2, 40)
    logits[0, 1] = float("-inf")
    logits[0, 1, [3, 30]] = 1.0
    found = triton_tree.top_candidates(logits.to(DEVICE), torch.arange(40, device=DEVICE) + 100, 4, None)
    assert found.token_ids[0, 0].tolist() == [100, 101, 102, 103]
    assert found.token_ids[0, 1, :2].tolist() == [103, 130]
    assert found.log_probs[0, 1, 2:].tolist() == [float("-inf")] * 2


def test_no_requests_need_no_launch():
    none = torch.zeros(0, 5, dtype=torch.int64, device=DEVICE)
    assert triton_tree.walk_tree(none, none, none[:, 0], none, 3).nodes.shape == (0, 3)
    assert triton_tree.ancestors(none, None, pack=False).shape == (0, 5, 5)
    assert triton_tree.path_token_ids(none, none, 2).shape == (0, 5, 2)
    logits = torch.zeros(0, 2, 9, device=DEVICE)
    assert triton_tree.top_candidates(logits, torch.arange(9, device=DEVICE), 3, None).log_probs.shape == (0, 2, 3)
    table = KernelTable(0, 2, 2, DEVICE)
    candidates = torch.zeros(0, 1, 2, dtype=torch.int64, device=DEVICE)
    assert table.grow(0, candidates, candidates.float()).scores.shape == (0, 2)
    assert table.finish(none[:, 0], 4, none[:, 0]).ancestor_words.shape == (0, 4, 1)


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("num_reqs", "top_k", "steps", "num_nodes"), [(1, 10, 7, 60), (64, 8, 6, 64), (5, 16, 9, 257)]
    )
    def test_growth_at_real_shapes(self, num_reqs, top_k, steps, num_nodes):
        check_growth(num_reqs, top_k, steps, num_nodes)

    @pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
    @pytest.mark.parametrize(("num_reqs", "width", "vocab_size"), [(1, 10, 32000), (32, 8, 32000), (3, 1, 151936)])
    def test_candidates_at_real_shapes(self, num_reqs, width, vocab_size, coupled):
        check_candidates(num_reqs, width, vocab_size, 10, coupled=coupled)

    @pytest.mark.parametrize(("num_reqs", "num_nodes"), [(1, 60), (256, 64), (16, 513)])
    def test_walks_and_masks_at_real_shapes(self, num_reqs, num_nodes):
        check_walk(num_reqs, num_nodes, 9)
        check_ancestors(num_reqs, num_nodes, 12)

    def test_a_captured_growth_follows_its_candidates(self):
        num_reqs, top_k, steps, num_nodes = 4, 8, 5, 48
        table = TreeTable(num_reqs, top_k, steps, "cuda")
        reference = TreeTable(num_reqs, top_k, steps, "cpu")
        roots, positions = torch.arange(num_reqs), torch.arange(num_reqs) * 5
        levels = [[part.cuda() for part in pair] for pair in random_levels(num_reqs, top_k, steps, 0)]
        device_roots, device_positions = roots.cuda(), positions.cuda()

        def grow() -> tree.PackedTree:
            for level, candidates in enumerate(levels):
                table.add_level(level, *candidates)
            return table.finalize_packed(device_roots, num_nodes, device_positions)

        grow()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            packed = grow()
        for seed in range(1, 4):
            fresh = list(random_levels(num_reqs, top_k, steps, seed))
            for captured, pair in zip(levels, fresh, strict=True):
                for to, part in zip(captured, pair, strict=True):
                    to.copy_(part)
            graph.replay()
            for level, pair in enumerate(fresh):
                reference.add_level(level, *pair)
            expected = reference.finalize_packed(roots, num_nodes, positions)
            for name, column in packed.tree._asdict().items():
                assert torch.equal(column.cpu(), getattr(expected.tree, name)), name
            assert torch.equal(packed.ancestor_words.cpu(), expected.ancestor_words)
