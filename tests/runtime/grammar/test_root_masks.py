"""The drafter gets masks of the tokens allowed behind the roots and drafts only those; no text changes."""

import json

import numpy as np
import pytest
import torch

from tests.runtime.grammar.world import (
    SPECS,
    TOKENIZER,
    Constrained,
    demo_drafter,
    generate,
    params_of,
)
from tests.runtime.models import CHAIN, TREE, engine_config, new_engine
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters import merged_batch
from wingbeat.runtime.drafters.growth import Growth, Roots
from wingbeat.runtime.grammar.grammar_masker import MOST_SLOW, GrammarMasker, fill_row
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, RoundHeader, outcome_layout
from wingbeat.runtime.scheduling.request import GrammarSpec, RequestTooExpensive


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
    roots = Roots(zeros, zeros, zeros + torch.arange(3)[:, None], torch.full((count,), temperature), zeros + 7, rows)
    growth = Growth(SpeculationConfig(3, top_k, 1 + 3 * top_k), draft_token_ids)
    logits = torch.randn(count, 1, 40)

    def grow(some):
        return growth.grow(some, logits, lambda level: torch.randn(count, level.token_ids.shape[1], 40))

    trees, free = grow(roots), grow(roots._replace(allowed_tokens=None))
    first, before = (
        [set(tree.token_ids[row][(tree.depths[row] == 1)].tolist()) for row in range(count)] for tree in (trees, free)
    )
    assert first[0] <= allowed[0]
    assert len(first[0]) == min(top_k, 2)
    assert not before[0] <= allowed[0]
    # Where nothing is forbidden, or the drafter knows no token that may follow, it drafts as ever.
    assert first[1:3] == before[1:3]
    assert first[3] <= allowed[3]


class Listener(ScriptedDrafter):
    """A drafter that records the masks it gets, each with its sequence's history."""

    def propose(self, batch):
        for row, slot in enumerate(batch.proposal_slots.tolist()):
            history = batch.token_ids[slot, : batch.committed_lens[slot]].tolist()
            told = None if batch.allowed_tokens is None else batch.allowed_tokens[row].numpy().copy()
            self.heard.append((history, told))
        return super().propose(batch)


def listener(sequences, loaded):
    drafter = Listener(sequences, right_tree, loaded.vocab_size)
    drafter.heard = []
    return drafter


def test_the_drafter_is_told_what_its_roots_allow(loaded, grammars, monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.grammar.grammar_masker.MOST_AHEAD_S", 10.0)
    prompts = [TOKENIZER.encode(text) for text in ("a = ", "bc = ")]
    params = [params_of(SPECS[0], 1), params_of(SPECS[1], 2)]
    plain, _ = generate(loaded, grammars, prompts, params)
    drafter = listener([prompt + more + [1] * 8 for prompt, more in zip(prompts, plain, strict=True)], loaded)
    tokens, _ = generate(loaded, grammars, prompts, params, drafter)
    assert tokens == plain
    assert len(drafter.heard) > 10
    for history, told in drafter.heard:
        index = next(i for i, prompt in enumerate(prompts) if history[: len(prompt)] == prompt)
        matcher = grammars.compile(params[index].grammar).matcher()
        expected = np.full((1, -(-loaded.vocab_size // 32)), -1, np.int32)
        answer = history[len(prompts[index]) :]
        if 0 not in answer:  # no mask is sent behind the end of the text
            assert all(map(matcher.consume_token, answer))
            fill_row(matcher, expected, 0)
        assert told is None or np.array_equal(told, expected[0])
    assert sum(told is not None for _, told in drafter.heard) > 10


def test_rounds_in_flight_tell_nothing(loaded, grammars):
    """With rounds in flight the host does not have the roots in time."""
    prompt, params = TOKENIZER.encode("a = "), params_of(SPECS[0], 1)
    plain, _ = generate(loaded, grammars, [prompt], [params])
    drafter = listener([prompt + plain[0] + [1] * 8], loaded)
    config = engine_config(max_model_len=512, num_kv_blocks=300, overlap=True)
    engine = new_engine(loaded, config, drafter, on_host=False)
    try:
        assert Constrained(engine, grammars, [prompt], [params]).finish() == plain
    finally:
        engine.model.remove_taps()
    assert drafter.heard
    assert all(told is None for _, told in drafter.heard)


def test_a_slow_grammar_is_asked_no_more(loaded, grammars, monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.grammar.grammar_masker.MOST_AHEAD_S", -1.0)
    prompt, params = TOKENIZER.encode("a = "), params_of(SPECS[0], 1)
    plain, _ = generate(loaded, grammars, [prompt], [params])
    drafter = listener([prompt + plain[0] + [1] * 8], loaded)
    tokens, _ = generate(loaded, grammars, [prompt], [params], drafter)
    assert tokens == plain
    assert sum(told is not None for _, told in drafter.heard) == MOST_SLOW < len(drafter.heard)


@pytest.mark.parametrize("vocab_size", [97, 0], ids=["says nothing", "cannot say anything"])
def test_verifiers_that_restrict_nothing_share_a_pass_with_those_that_do(vocab_size):
    rounds = []
    for size, has_masks, proposals in ((97, 1, 2), (vocab_size, 0, 3), (97, 1, 1)):
        spec = ChannelSpec(4, 5, 5, 8, 0, 64, 8, 8, 16, vocab_size=size)
        outcome = Outcome(*(torch.zeros(shape, dtype=dtype) for shape, dtype in outcome_layout(spec).values()))
        outcome.allowed_tokens[:] = size
        header = RoundHeader(num_proposals=proposals, has_masks=has_masks)
        rounds.append((None, outcome, header))
    assert merged_batch._allowed_tokens(rounds, torch.device("cpu")).tolist() == [[97] * 4] * 2 + [[-1] * 4] * 3 + [
        [97] * 4
    ]


def test_looking_ahead_takes_nothing(grammars):
    masker = GrammarMasker(grammars.compile(GrammarSpec("choice", '["yes", "no"]')))
    yes, mask = TOKENIZER.encode("yes"), np.zeros(128, np.int32)
    assert masker.ahead(yes[:1], mask) or len(yes) == 1
    assert not masker.ahead([*yes, yes[0]], mask)
    assert not masker.ahead(TOKENIZER.encode("q"), mask)
    assert masker.allows(yes[0])
    assert not masker.allows(TOKENIZER.encode("q")[0])
    assert [masker.accept(token_id) for token_id in yes][:-1] == [False] * (len(yes) - 1)


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


def test_a_draft_that_was_left_changes_no_mask_behind_it(loaded, grammars):
    """llguidance 1.9.1 keeps parser rows of rolled-back tokens, which masked a value as a key."""
    grammar = grammars.compile(GrammarSpec("json_object", ""))
    ids = {text: TOKENIZER.encode(text)[0] for text in ("{", '"', '":', ' "', "M", "S", "G")}
    before, draft, after = ["{", '"', '":'], ["{", '"', "M"], [' "', "M", "S", "G"]
    assert all(TOKENIZER.decode([token_id]) == text for text, token_id in ids.items())
    masker, alone = GrammarMasker(grammar), GrammarMasker(grammar)
    num_words = grammar.vocabulary.num_words
    for text in before:
        masker.accept(ids[text])
        alone.accept(ids[text])
    nodes = np.array([0, *(ids[text] for text in draft)], np.int64)
    masker.fill(nodes, np.array([-1, 0, 1, 2], np.int64), np.zeros((4, num_words), np.int32))
    assert masker.ahead([ids[text] for text in draft], np.zeros(num_words, np.int32))
    for text in after:
        masks = np.zeros((2, 1, num_words), np.int32)
        for one, mask in zip((masker, alone), masks, strict=True):
            one.accept(ids[text])
            one.fill(np.zeros(1, np.int64), np.full(1, -1, np.int64), mask)
        assert np.array_equal(*masks), text


class MeetsABound:
    """A matcher whose copies stop at their first token, as if a limit had been reached."""

    def __init__(self, own, is_copy=False):
        self._own, self._is_copy, self._met = own, is_copy, False

    def __getattr__(self, name):
        return getattr(self._own, name)

    def deep_copy(self):
        return MeetsABound(self._own.deep_copy(), is_copy=True)

    def try_consume_tokens(self, token_ids):
        self._met = self._is_copy
        return 0 if self._is_copy else self._own.try_consume_tokens(token_ids)

    def is_error(self):
        return self._met or self._own.is_error()


def test_a_draft_that_meets_a_bound_is_not_taken_for_a_forbidden_one(grammars):
    masker = GrammarMasker(grammars.compile(GrammarSpec("regex", "[a-z]+")))
    masker._matcher = MeetsABound(masker._matcher)
    a, b = (TOKENIZER.encode(text)[0] for text in "ab")
    masks = np.zeros((2, masker._vocabulary.num_words), np.int32)
    assert not masker.fill(np.array([0, a], np.int64), np.array([-1, 0], np.int64), masks)
    masker.accept(a)
    assert masker.allows(b)


def test_a_matcher_that_refuses_what_its_masks_allow_is_too_dear(loaded, grammars):
    """In llguidance 1.9.1 nested repeats of an empty rule reach a limit that no call reports."""
    repeats = 'root ::= [b-z]{3} q{0,3000}\nq ::= r{0,3000}\nr ::= "a"?'
    masker = grammars.compile(GrammarSpec("grammar", repeats, field="structured_outputs.grammar")).masker(())
    (first,), (more,) = TOKENIZER.encode("b"), TOKENIZER.encode("a")
    drafted = np.array([0] + [more] * 7), np.array([0, *range(7)])
    masks = np.zeros((8, -(-loaded.vocab_size // 32)), np.int32)

    def write():
        for token_id in [first] * 3 + [more] * 400:
            masker.fill(*drafted, masks)
            masker.accept(token_id)

    with pytest.raises(RequestTooExpensive, match=r"structured_outputs\.grammar takes more"):
        write()
