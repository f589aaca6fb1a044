"""Bias, penalties and grammar: the published formulas, their order, and misfits refused by name."""

import re

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from wingbeat.kernels.sampling.processors import LogitBias, LogitProcessors, Penalties, apply_processors
from wingbeat.kernels.sampling.reference import choose_tokens

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
