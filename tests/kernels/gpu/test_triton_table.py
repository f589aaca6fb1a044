"""Growth kernels against their reference: the same frontiers and trees, ties and padding included."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gpu.test_triton_candidates import random_coupling
from wingbeat.kernels.gpu.tree import candidates as triton_candidates
from wingbeat.kernels.gpu.tree import table as triton_tree_growth
from wingbeat.kernels.tree.candidates import new_counters
from wingbeat.kernels.tree.results import Coupling, Frontier, GrownTree
from wingbeat.kernels.tree.table import TreeTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU")]


pytestmark = [pytest.mark.few(3), pytest.mark.usefixtures("poisoned_memory")]


class KernelTable(TreeTable):
    """A table that grows by the kernels on any device, as a CUDA table does."""

    def grow(
        self, level: int, token_ids: torch.Tensor, log_probs: torch.Tensor, itself: torch.Tensor | None
    ) -> Frontier:
        previous, begin = None if level == 0 else self._frontier, self.level_start(level)
        entered = triton_tree_growth.Level(previous, self._tensors, begin, itself)
        self._frontier = triton_tree_growth.add_level(token_ids, log_probs, entered)
        return self._frontier

    def finish(self, roots: torch.Tensor, num_nodes: int) -> GrownTree:
        return triton_tree_growth.finalize(self._tensors, self._depths, roots, num_nodes)


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
    roots = torch.arange(num_reqs) + 5000
    # The second tree reuses the table and stops early.
    for tree_number, levels in enumerate((steps, max(steps - 1, 1))):
        for level, candidates in enumerate(random_levels(num_reqs, top_k, levels, tree_number)):
            itself = torch.randint(-(2**62), 2**62, (top_k, 3), generator=torch.Generator().manual_seed(level))
            expected = expected_table.add_level(level, *candidates, itself)
            frontier = table.grow(level, *(part.to(DEVICE) for part in (*candidates, itself)))
            for name, column in frontier._asdict().items():
                assert torch.equal(column.cpu(), getattr(expected, name)), f"level {level}: {name}"
        expected = expected_table.finalize(roots, num_nodes)
        for name, column in table.finish(roots.to(DEVICE), num_nodes)._asdict().items():
            assert torch.equal(column.cpu(), getattr(expected, name)), name


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("top_k", "steps", "num_nodes"), [(3, 3, 7), (1, 4, 5), (2, 2, 1), (4, 2, 70)], ids=["tree", "chain", "root", "pad"]
)
def test_growth_is_the_references(top_k, steps, num_nodes):
    check_growth(3, top_k, steps, num_nodes)


def test_a_tree_of_more_nodes_than_a_word_has_bits_is_the_references():
    check_growth(2, 6, 5, 90)


def test_no_requests_need_no_launch():
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    table = KernelTable(0, 2, 2, DEVICE)
    candidates = torch.zeros(0, 1, 2, dtype=torch.int64, device=DEVICE)
    assert table.grow(0, candidates, candidates.float(), None).scores.shape == (0, 2)
    assert table.finish(none, 4).parents.shape == (0, 4)


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("num_reqs", "top_k", "steps", "num_nodes"), [(1, 10, 7, 60), (64, 8, 6, 64), (5, 16, 9, 257)]
    )
    def test_growth_at_real_shapes(self, num_reqs, top_k, steps, num_nodes):
        check_growth(num_reqs, top_k, steps, num_nodes)

    def test_a_captured_growth_follows_its_candidates(self):
        num_reqs, top_k, steps, num_nodes = 4, 8, 5, 48
        table = TreeTable(num_reqs, top_k, steps, "cuda")
        reference = TreeTable(num_reqs, top_k, steps, "cpu")
        roots = torch.arange(num_reqs)
        levels = [[part.cuda() for part in pair] for pair in random_levels(num_reqs, top_k, steps, 0)]
        device_roots = roots.cuda()

        def grow() -> GrownTree:
            for level, candidates in enumerate(levels):
                table.add_level(level, *candidates)
            return table.finalize(device_roots, num_nodes)

        grow()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tree = grow()
        for seed in range(1, 4):
            fresh = list(random_levels(num_reqs, top_k, steps, seed))
            for captured, pair in zip(levels, fresh, strict=True):
                for to, part in zip(captured, pair, strict=True):
                    to.copy_(part)
            graph.replay()
            for level, pair in enumerate(fresh):
                reference.add_level(level, *pair)
            expected = reference.finalize(roots, num_nodes)
            for name, column in tree._asdict().items():
                assert torch.equal(column.cpu(), getattr(expected, name)), name


@pytest.mark.few(1)
@pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
@pytest.mark.parametrize(("num_reqs", "top_k"), [(1, 3), (3, 5)])
def test_levels_of_the_likeliest_tokens_are_the_references(num_reqs, top_k, coupled, monkeypatch):
    """Rows are shared among programs; the counters are those of the level before."""
    monkeypatch.setattr(triton_candidates, "_LEAST_SHARE", 16)
    steps, vocab_size, ids = 3, 70, torch.arange(70) * 3
    expected_table, table = (KernelTable(num_reqs, top_k, steps, device) for device in ("cpu", DEVICE))
    counters, frontier = new_counters(num_reqs * (top_k + 1), torch.device(DEVICE)), None
    generator = torch.Generator().manual_seed(top_k)
    for level in range(steps):
        logits = torch.randn(num_reqs, top_k if level else 1, vocab_size, generator=generator)
        itself = torch.randint(-(2**62), 2**62, (top_k, 2), generator=generator)
        coupling = random_coupling(num_reqs) if coupled else None
        expected, log_probs = expected_table.add_best(level, logits, ids, coupling, None, itself)
        moved = None if coupling is None else Coupling(*(column.to(DEVICE) for column in coupling))
        entered = triton_tree_growth.Level(frontier, table._tensors, table.level_start(level), itself.to(DEVICE))
        found, frontier = triton_candidates.grown_candidates(
            logits.to(DEVICE), ids.to(DEVICE), top_k, moved, counters, entered
        )
        torch.testing.assert_close(found.log_probs.cpu(), log_probs, rtol=1e-5, atol=1e-5)
        for name, column in frontier._asdict().items():
            torch.testing.assert_close(column.cpu(), getattr(expected, name), rtol=1e-5, atol=1e-5, msg=name)
    assert not counters.any()
    torch.testing.assert_close(table._scores.cpu(), expected_table._scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(table._parents.cpu(), expected_table._parents)
