"""Drafts behind a root are tokens that its grammar allows; no text changes."""

import json

import numpy as np
import pytest
import torch

from tests.runtime.grammar.world import TOKENIZER, demo_drafter, generate, params_of
from tests.runtime.models import CHAIN, TREE
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.draft_rules.draft_rules import MaskedRoots
from wingbeat.runtime.drafters.growth import Growth, Roots
from wingbeat.runtime.grammar.grammar_masker import GrammarMasker
from wingbeat.runtime.scheduling.request import GrammarSpec


def packed(allowed, vocab_size):
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [1, 3])
def test_the_first_level_holds_allowed_tokens_alone(top_k, temperature):
    """The draft vocabulary may also be a part of the target's, in another order."""
    torch.manual_seed(0)
    vocab_size, draft_token_ids = 100, torch.randperm(100)[:40]
    known = draft_token_ids.tolist()
    allowed = [set(known[3:5]) | {token_id for token_id in range(100) if token_id not in known}]
    allowed += [set(range(100)), set(range(100)) - set(known), {31, 63, 95} | set(known[:1])]
    rows = torch.stack([packed(tokens, vocab_size) for tokens in allowed])
    count = len(allowed)
    zeros = torch.zeros(count, dtype=torch.int64)
    roots = Roots(zeros, zeros, zeros + torch.arange(3)[:, None], torch.full((count,), temperature), zeros + 7)
    growth = Growth(SpeculationConfig(3, top_k, 1 + 3 * top_k), draft_token_ids)
    rules = MaskedRoots(rows, draft_token_ids, None)
    logits = torch.randn(count, 1, 40)

    def grow(some):
        return growth.grow(some, logits, lambda level: torch.randn(count, level.token_ids.shape[1], 40))

    trees, free = grow(roots._replace(rules=rules)), grow(roots)
    first, before = (
        [set(tree.token_ids[row][(tree.depths[row] == 1)].tolist()) for row in range(count)] for tree in (trees, free)
    )
    assert first[0] <= allowed[0]
    assert len(first[0]) == min(top_k, 2)
    assert not before[0] <= allowed[0]
    # Where nothing is forbidden, or the drafter knows no token that may follow, it drafts as ever.
    assert first[1:3] == before[1:3]
    assert first[3] <= allowed[3]


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_of_json_are_accepted_more_often(loaded, grammars, monkeypatch, shape):
    spec = GrammarSpec("json", json.dumps({"type": "object", "additionalProperties": {"enum": ["left", "right", 7]}}))
    prompts = [TOKENIZER.encode("data = ")] * 4
    params = [params_of(spec, seed, max_tokens=40) for seed in range(4)]
    told, run = generate(loaded, grammars, prompts, params, demo_drafter(shape), shape)
    monkeypatch.setattr(GrammarMasker, "ahead", lambda *args: False)
    untold, without = generate(loaded, grammars, prompts, params, demo_drafter(shape), shape)
    assert told == untold
    assert run.engine.speculation.num_drafts < 0.9 * without.engine.speculation.num_drafts
