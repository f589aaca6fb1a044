"""The candidates kernel against its reference, in order where scores are equal."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from wingbeat.kernels.gpu.tree import candidates as triton_candidates
from wingbeat.kernels.tree import candidates
from wingbeat.kernels.tree.results import Coupling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(DEVICE != "cuda", reason="needs an NVIDIA GPU")]


pytestmark = [pytest.mark.few(3), pytest.mark.usefixtures("poisoned_memory")]


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
    expected = candidates.top_candidates(**inputs, top_k=top_k, coupling=coupling)
    actual = triton_candidates.top_candidates(
        **{name: value.to(DEVICE) for name, value in inputs.items()}, top_k=top_k, coupling=moved
    )
    assert torch.equal(actual.token_ids.cpu(), expected.token_ids)
    torch.testing.assert_close(actual.log_probs.cpu(), expected.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
@pytest.mark.parametrize(("vocab_size", "top_k"), [(7, 7), (63, 3), (150, 5), (1, 1)])
def test_candidates_are_the_references(vocab_size, top_k, coupled, monkeypatch):
    monkeypatch.setattr(triton_candidates, "_CANDIDATE_TILE", 64)
    check_candidates(3, 2, vocab_size, top_k, coupled=coupled)


@pytest.mark.few(1)
@pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
@pytest.mark.parametrize(("vocab_size", "top_k"), [(61, 3), (70, 10), (17, 17)])
def test_programs_that_share_a_row_find_the_references_candidates(vocab_size, top_k, coupled, monkeypatch):
    """Shares of a few tokens, of which the last is shorter; some have fewer tokens than there are candidates."""
    monkeypatch.setattr(triton_candidates, "_LEAST_SHARE", 2)
    monkeypatch.setattr(triton_candidates, "_CANDIDATE_TILE", 8)
    grids = watch_grids(monkeypatch)
    check_candidates(2, 1, vocab_size, top_k, coupled=coupled)
    assert grids == [(2, -(-vocab_size // -(-vocab_size // 8)))]


def watch_grids(monkeypatch) -> list[tuple[int, ...]]:
    """Where the grid of each launch over shares goes."""
    kernel, grids = triton_candidates._candidates_kernel, []

    class Watched:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_candidates, "_candidates_kernel", Watched())
    return grids


@pytest.mark.parametrize("least_share", [1024, 2])
def test_equal_candidates_come_in_order_and_missing_ones_are_marked(least_share, monkeypatch):
    monkeypatch.setattr(triton_candidates, "_CANDIDATE_TILE", 16)
    monkeypatch.setattr(triton_candidates, "_LEAST_SHARE", least_share)
    logits = torch.zeros(1, 2, 40)
    logits[0, 1] = float("-inf")
    logits[0, 1, [3, 30]] = 1.0
    found = triton_candidates.top_candidates(logits.to(DEVICE), torch.arange(40, device=DEVICE) + 100, 4, None)
    assert found.token_ids[0, 0].tolist() == [100, 101, 102, 103]
    assert found.token_ids[0, 1, :2].tolist() == [103, 130]
    assert found.log_probs[0, 1, 2:].tolist() == [float("-inf")] * 2


def test_no_requests_need_no_launch():
    logits = torch.zeros(0, 2, 9, device=DEVICE)
    found = triton_candidates.top_candidates(logits, torch.arange(9, device=DEVICE), 3, None)
    assert found.log_probs.shape == (0, 2, 3)


@pytest.mark.parametrize("coupled", [False, True], ids=["plain", "coupled"])
@pytest.mark.parametrize(("num_reqs", "width", "vocab_size"), [(1, 10, 32000), (32, 8, 32000), (3, 1, 151936)])
class TestOnGpu:
    pytestmark = gpu

    def test_candidates_at_real_shapes(self, num_reqs, width, vocab_size, coupled):
        check_candidates(num_reqs, width, vocab_size, 10, coupled=coupled)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's reductions are replaced")
def test_a_row_of_nan_gets_tokens_that_exist(monkeypatch):
    """Comparisons with NaN are false, so a GPU may end at any lane: here at the last one, past the vocabulary."""
    monkeypatch.setattr(np, "nanmax", np.max)
    monkeypatch.setattr(np, "nanargmax", lambda values, **options: np.full_like(np.argmax(values, **options), 63))
    behind = torch.full((64,), -1)
    behind[:40] = torch.arange(40)
    found = triton_candidates.top_candidates(torch.full((1, 1, 40), float("nan")), behind[:40], 4, None)
    assert ((found.token_ids >= 0) & (found.token_ids < 40)).all()
