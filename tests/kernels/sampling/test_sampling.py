"""Sampling reference: transformers' warper semantics, exact distributions, and rows that do not see each other."""

import math
from dataclasses import dataclass

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.kernels.chi_square import CHI2_LIMIT, chi_square
from wingbeat.kernels.sampling.reference import choose_tokens, process_logits, sampling_workspace

pytestmark = pytest.mark.few(4)


@dataclass(frozen=True)
class Rows:
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor

    def __getitem__(self, rows) -> tuple[torch.Tensor, ...]:
        return self.temperatures[rows], self.top_ks[rows], self.top_ps[rows], self.min_ps[rows]


PARAMETERS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (0.0, 5, 0.5, 0.1),
    (1.3, 40, 1.0, 0.0),
    (0.5, 1, 1.0, 0.0),
    (1.0, 5000, 0.95, 0.05),
    (1.0, 200, 0.9, 0.0),
    (1.0, 0, 1.0, 0.2),
    (2.0, 50, 0.6, 0.02),
    (1.0, 0, 1e-6, 0.0),
    (0.9, 0, 1.0, 1.0),
    (0.0, 0, 1.0, 0.0),
    (1e-3, 0, 0.99, 0.0),
]


def mixed_rows(num_rows: int) -> Rows:
    chosen = [PARAMETERS[row % len(PARAMETERS)] for row in range(num_rows)]
    temperatures, top_ks, top_ps, min_ps = (torch.tensor(column) for column in zip(*chosen, strict=True))
    return Rows(temperatures, top_ks, top_ps, min_ps)


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """A row of logits after transformers' warpers, in the order in which `generate()` applies them."""
    if temperature == 0:
        return logits
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores[0]


@pytest.mark.parametrize("vocab_size", [7, 63, 1003, 4096])
@pytest.mark.parametrize("kind", ["gaussian", "peaked", "tied", "masked"])
def test_processing_agrees_with_transformers(vocab_size, kind):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(39, vocab_size, generator=generator) * (8 if kind == "peaked" else 2)
    if kind == "tied":
        logits = logits.round()
    if kind == "masked":
        logits[:, 1::3] = float("-inf")
    rows = mixed_rows(39)
    before = logits.clone()
    processed = process_logits(logits, *rows[:])
    assert torch.equal(logits, before)
    for row in range(39):
        expected = warped(logits[row], *PARAMETERS[row % len(PARAMETERS)])
        actual = processed[row]
        if kind == "tied":
            # The sort decides which of several tied logits at the edge of the nucleus stay; their number is determined.
            actual, expected = actual.sort().values, expected.sort().values
        assert torch.equal(actual, expected), f"row {row}: {PARAMETERS[row % len(PARAMETERS)]}"


def test_processing_without_filters_divides_only():
    logits = torch.randn(4, 63, generator=torch.Generator().manual_seed(0))
    off = (torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.zeros(4))
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0])
    assert torch.equal(
        process_logits(logits, temperatures, *off), process_logits(logits, temperatures, *off, any_filtered=False)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_gets_the_same_token_in_any_batch(dtype):
    generator = torch.Generator().manual_seed(5)
    num_rows, vocab_size = 47, 1003
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
    seeds, positions = torch.arange(num_rows) * 7919, torch.arange(num_rows) + 11
    rows = mixed_rows(num_rows)
    together = choose_tokens(logits, *rows[:], seeds, positions, any_sampled=True, any_filtered=True)
    order = torch.randperm(num_rows, generator=generator)
    shuffled = choose_tokens(
        logits[order], *rows[order], seeds[order], positions[order], any_sampled=True, any_filtered=True
    )
    assert torch.equal(shuffled, together[order])
    for row in range(num_rows):
        temperature, top_k, top_p, min_p = PARAMETERS[row % len(PARAMETERS)]
        at = slice(row, row + 1)
        alone = choose_tokens(
            logits[at],
            *rows[at],
            seeds[at],
            positions[at],
            any_sampled=temperature > 0,
            any_filtered=top_k > 0 or top_p < 1 or min_p > 0,
        )
        assert alone.item() == together[row].item()


def test_greedy_takes_the_lowest_of_equal_logits():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    greedy = (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.zeros(2))
    for any_sampled in (False, True):
        tokens = choose_tokens(
            logits, *greedy, torch.arange(2), torch.arange(2), any_sampled=any_sampled, any_filtered=False
        )
        assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("varying", ["seeds", "positions"])
@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.9)], ids=["T1", "T0.7", "T0.7-p0.9"]
)
def test_sampled_tokens_follow_softmax(varying, temperature, top_p):
    """n = 50,000 draws of a vocabulary of 10, over small consecutive seeds (requests) or positions (one request).

    Every kept token has an expected count of 40 at least, so the statistic is chi-square with (kept - 1) <= 9 degrees
    of freedom; the limit is its 1 - 1e-6 quantile. A bias of the size once seen in the field (0.600 drawn as 0.630)
    would add n * 0.03**2 / 0.6 = 75 and fail.
    """
    num_draws = 50_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5])
    count, still = torch.arange(num_draws), torch.full((num_draws,), 12)
    seeds, positions = (count, still) if varying == "seeds" else (still, count)
    full = torch.ones(num_draws)
    tokens = choose_tokens(
        logits.expand(num_draws, -1),
        full * temperature,
        torch.zeros(num_draws, dtype=torch.int64),
        full * top_p,
        full * 0,
        seeds,
        positions,
        any_sampled=True,
        any_filtered=top_p < 1,
    )
    expected = warped(logits, temperature, 0, top_p, 0.0).double().softmax(-1) * num_draws
    counts = torch.bincount(tokens, minlength=10)
    kept = expected > 0
    assert expected[kept].min() > 40
    assert counts[~kept].sum() == 0
    assert chi_square(counts[kept], expected[kept]) < CHI2_LIMIT[9]
    # Successive draws are independent too: joint counts of (choice is token 0) on neighbours.
    first = (tokens == 0).double()
    share = first.mean()
    correlation = ((first[1:] - share) * (first[:-1] - share)).mean() / (share * (1 - share))
    assert abs(correlation) < 5 / math.sqrt(num_draws)


def nucleus_edges(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> tuple[set[int], set[int]]:
    """Tokens that must stay and tokens that may, in float64 from the definitions; between them lies rounding alone."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), -token))
    kept = [token for token in order if not top_k or logits[token] >= logits[order[min(top_k, len(order)) - 1]]]
    probabilities = torch.softmax(logits[kept].double(), dim=0).tolist()
    must, may, above = set(), set(), 0.0
    for token, probability in zip(kept, probabilities, strict=True):
        slack = above - top_p if top_p < 1 else -1.0
        if slack < -1e-6 or not must:
            must.add(token)
        if slack < 1e-6 or len(may) == 0:
            may.add(token)
        above += probability
    largest = max(probabilities)
    floor = {token: probability / largest for token, probability in zip(kept, probabilities, strict=True)}
    must = {token for token in must if floor[token] >= min_p + (1e-6 if min_p and floor[token] < 1 else 0)}
    return must, {token for token in may if floor[token] >= min_p - 1e-6}


@pytest.mark.parametrize("vocab_size", [60, 300])
def test_filters_keep_the_smallest_set_that_has_the_mass(vocab_size):
    logits = torch.randn(26, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    rows = mixed_rows(26)
    processed = process_logits(logits, *rows[:])
    for row in range(26):
        temperature, top_k, top_p, min_p = PARAMETERS[row % len(PARAMETERS)]
        if temperature:
            must, may = nucleus_edges(logits[row] / temperature, top_k, top_p, min_p)
            kept = set((processed[row] > float("-inf")).nonzero().flatten().tolist())
            assert must <= kept <= may, f"row {row}: {PARAMETERS[row % len(PARAMETERS)]}"


def test_the_cpu_needs_no_workspace():
    assert sampling_workspace(4, 70, "cpu") is None
