"""Sampling reference: noise quality, transformers' warper semantics, and rows that do not see each other."""

import math
import re
from dataclasses import dataclass

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from wingbeat.kernels.sampling import (
    LogitBias,
    LogitProcessors,
    Penalties,
    apply_processors,
    choose_tokens,
    gumbel_noise,
    noise_bits,
    process_logits,
    sampling_workspace,
)

WORD = 0xFFFFFFFF
# Chi-square limits at p = 1e-6: a right sampler fails one run in a million, and seeds are fixed, so never twice.
CHI2_LIMIT = {9: 44.81, 63: 131.37, 255: 377.07}  # by degrees of freedom


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def triple32(word: int) -> int:
    for shift, multiplier in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        word = ((word ^ word >> shift) * multiplier) & WORD
    return word ^ word >> 14


def bits_of(seed: int, position: int, token: int) -> int:
    """The documented recipe in unbounded integers."""
    low, high = seed & WORD, seed >> 32 & WORD
    keys = [triple32(triple32(triple32(low ^ lane) ^ high) ^ position & WORD) for lane in (0x9E3779B9, 0x85EBCA6B)]
    word = triple32(token & WORD ^ 0xC2B2AE35) ^ keys[0]
    word = ((word ^ word >> 17) * 0xED5AD4BB) & WORD
    word = (((word ^ word >> 11) + keys[1]) * 0xAC4C1B51) & WORD
    word = ((word ^ word >> 15) * 0x31848BAB) & WORD
    return word >> 9


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((observed.double() - expected.double()) ** 2 / expected.double()).sum())


def test_noise_bits_are_the_documented_integers():
    seeds = torch.tensor([0, 1, -1, 2**31, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
    positions = torch.tensor([0, 1, 2**31 - 1, 5, 131071, 7, 42])
    tokens = torch.tensor([0, 1, 2, 31999, 151935, 2**31 - 1])
    expected = [
        [bits_of(s, p, t) for t in tokens.tolist()] for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert noise_bits(seeds, positions, tokens).tolist() == expected


def test_noise_depends_on_its_key_only():
    seeds, positions = torch.arange(9) * 17, torch.arange(9) + 3
    whole = gumbel_noise(seeds, positions, torch.arange(1003))
    for row in range(9):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], torch.arange(501, 1003))
        assert torch.equal(alone[0], whole[row, 501:])


def test_noise_is_finite_and_gumbel():
    noise = gumbel_noise(torch.arange(64), torch.arange(64), torch.arange(4096)).double().flatten()
    assert torch.isfinite(noise).all()
    # Standard Gumbel: mean 0.5772, variance pi^2 / 6; over 262,144 draws the errors of both stay below 6 sigma.
    assert abs(noise.mean() - 0.57722) < 6 * math.sqrt(math.pi**2 / 6 / noise.numel())
    assert abs(noise.var() - math.pi**2 / 6) < 6 * math.sqrt((4.4 * (math.pi**2 / 6) ** 2) / noise.numel())


def neighbours(axis: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits at 262,144 keys, and at the same keys moved by one along an axis."""
    seeds, positions, tokens = torch.arange(64), torch.arange(64) + 100, torch.arange(4096)
    moved = {"seed": seeds, "position": positions, "token": tokens}
    before = noise_bits(seeds, positions, tokens)
    moved[axis] = moved[axis] + 1
    return before.flatten(), noise_bits(moved["seed"], moved["position"], moved["token"]).flatten()


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_neighbouring_keys_are_independent(axis):
    before, after = neighbours(axis)
    # Joint distribution of the top 4 bits on each side: 256 equally likely cells, 1024 draws each.
    counts = torch.bincount((before >> 19) * 16 + (after >> 19), minlength=256)
    assert chi_square(counts, torch.full((256,), before.numel() / 256)) < CHI2_LIMIT[255]
    # Every bit flips half the time: 0.5 +- 6 sigma over the draws.
    for bit in range(23):
        flips = ((before ^ after) >> bit & 1).double().mean()
        assert abs(flips - 0.5) < 6 * 0.5 / math.sqrt(before.numel())


@pytest.mark.parametrize("varying", ["seeds", "positions"])
def test_small_consecutive_keys_give_uniform_bits(varying):
    count, still = torch.arange(65536), torch.zeros(65536, dtype=torch.int64)
    seeds, positions = (count, still) if varying == "seeds" else (still, count)
    bits = noise_bits(seeds, positions, torch.tensor([0, 1]))
    for column in range(2):
        for shift in (17, 8, 0):
            counts = torch.bincount(bits[:, column] >> shift & 63, minlength=64)
            assert chi_square(counts, torch.full((64,), 1024.0)) < CHI2_LIMIT[63]
    # Two tokens of one row: joint distribution over 256 cells.
    counts = torch.bincount((bits[:, 0] >> 19) * 16 + (bits[:, 1] >> 19), minlength=256)
    assert chi_square(counts, torch.full((256,), 256.0)) < CHI2_LIMIT[255]


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
    """One row through transformers' warpers, in the order generate() builds them."""
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
            # Which of several equal logits at the edge of the nucleus stays is up to the sort; how many do is not.
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


VOCAB = 70  # the grammar's last word is partly used


def history(num_rows: int) -> tuple[Penalties, list[list[int]], list[list[int]]]:
    """Penalties, and each row's prompt and output tokens; row 1 has none, rows 0 and 2 share their tables."""
    generator = torch.Generator().manual_seed(0)
    prompts, outputs = (torch.randint(0, VOCAB, (2, 12), generator=generator) for _ in range(2))
    slots = torch.tensor([0, -1, 0, 1, 1][:num_rows])
    path = torch.randint(0, VOCAB, (5, 3), generator=generator)
    path[2, 1:] = -1
    path[3] = path[3, 0]
    path = path[:num_rows]
    prompt_mask = torch.zeros(2, VOCAB, dtype=torch.bool).scatter_(1, prompts, True)
    output_counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    output_counts.scatter_add_(1, outputs, torch.ones(2, 12, dtype=torch.int32))
    penalties = Penalties(
        repetition=torch.tensor([1.3, 1.5, 1.0, 0.8, 1.1][:num_rows]),
        presence=torch.tensor([0.5, 0.7, 0.0, -0.4, 0.1][:num_rows]),
        frequency=torch.tensor([0.2, 0.3, 0.6, -0.1, 0.0][:num_rows]),
        slots=slots,
        prompt_mask=prompt_mask,
        output_counts=output_counts,
        path_token_ids=path,
    )
    of_rows: tuple[list[list[int]], list[list[int]]] = ([], [])
    for row, slot in enumerate(slots.tolist()):
        of_rows[0].append([] if slot < 0 else prompts[slot].tolist())
        own = [token for token in path[row].tolist() if token >= 0]
        of_rows[1].append([] if slot < 0 else outputs[slot].tolist() + own)
    return penalties, *of_rows


def test_penalties_are_the_published_formulas():
    """Against transformers for repetition, and OpenAI's logit -= count * frequency + (count > 0) * presence."""
    penalties, prompts, outputs = history(5)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    before = logits.clone()
    actual = apply_processors(logits, LogitProcessors(penalties))
    assert torch.equal(logits, before)
    for row in range(5):
        expected = logits[row].double()
        if outputs[row]:
            seen = torch.tensor([prompts[row] + outputs[row]])
            penalty = float(penalties.repetition[row].double())
            expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, expected[None].clone())[0]
        for token in range(VOCAB):
            count = outputs[row].count(token)
            if count:
                expected[token] -= count * penalties.frequency[row].double() + penalties.presence[row].double()
        torch.testing.assert_close(actual[row].double(), expected, rtol=1e-6, atol=1e-6)


def test_bias_comes_before_penalties_and_the_grammar_last():
    penalties, *_ = history(2)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    bias = LogitBias(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)) * 5, torch.tensor([2, -1]))
    allowed = torch.rand(2, VOCAB, generator=torch.Generator().manual_seed(4)) < 0.5
    words = torch.zeros(2, 3, dtype=torch.int64)
    for row in range(2):
        for token in allowed[row].nonzero().flatten().tolist():
            words[row, token // 32] |= 1 << (token % 32)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    biased = logits + torch.stack([bias.table[2], torch.zeros(VOCAB)])
    penalized = apply_processors(biased, LogitProcessors(penalties))
    assert torch.equal(apply_processors(logits, LogitProcessors(None, bias)), biased)
    assert torch.equal(
        apply_processors(logits, LogitProcessors(penalties, bias, words)),
        penalized.masked_fill(~allowed, float("-inf")),
    )


def test_processors_act_on_greedy_and_sampled_rows_alike():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    only = LogitProcessors(grammar_mask=torch.tensor([[0, 1 << 9, 0], [1 << 3, 0, 0]], dtype=torch.int32))
    off = (torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.zeros(2), torch.arange(2), torch.arange(2))
    for temperatures, sampled in ((torch.zeros(2), False), (torch.tensor([0.0, 1.0]), True)):
        tokens = choose_tokens(logits, temperatures, *off, any_sampled=sampled, any_filtered=False, processors=only)
        assert tokens.tolist() == [41, 3]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("penalties.repetition", {"repetition": torch.ones(3)}),
        ("penalties.presence", {"presence": torch.ones(2, dtype=torch.float64)}),
        ("penalties.slots", {"slots": torch.zeros(2, dtype=torch.int32)}),
        ("penalties.prompt_mask", {"prompt_mask": torch.zeros(2, VOCAB)}),
        ("penalties.output_counts", {"output_counts": torch.zeros(3, VOCAB, dtype=torch.int32)}),
        ("penalties.path_token_ids", {"path_token_ids": torch.zeros(2, dtype=torch.int64)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_misshapen_penalties_are_refused_by_name(field, change):
    penalties, *_ = history(2)
    with pytest.raises(ValueError, match=re.escape(field)):
        apply_processors(torch.zeros(2, VOCAB), LogitProcessors(penalties._replace(**change)))


def test_misshapen_bias_and_grammar_are_refused_by_name():
    logits, rows = torch.zeros(2, VOCAB), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logit_bias\.table is torch\.float32 \[1, 69\]"):
        apply_processors(logits, LogitProcessors(logit_bias=LogitBias(torch.zeros(1, 69), rows)))
    with pytest.raises(ValueError, match=r"logit_bias\.rows"):
        apply_processors(logits, LogitProcessors(logit_bias=LogitBias(torch.zeros(1, VOCAB), rows[:1])))
    with pytest.raises(ValueError, match=r"grammar_mask .* \[2, 3\]"):
        apply_processors(logits, LogitProcessors(grammar_mask=torch.zeros(2, 2, dtype=torch.int32)))


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
    assert sampling_workspace(4, VOCAB, "cpu") is None
