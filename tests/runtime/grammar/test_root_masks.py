"""The drafter gets masks of the tokens allowed behind the roots and drafts only those; no text changes."""

import numpy as np
import pytest

from tests.runtime.grammar.world import (
    SPECS,
    TOKENIZER,
    Constrained,
    generate,
    params_of,
)
from tests.runtime.models import engine_config, new_engine
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.grammar.grammar_masker import MOST_SLOW, GrammarMasker, fill_row
from wingbeat.runtime.scheduling.request import GrammarSpec, RequestTooExpensive


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


def test_looking_ahead_takes_nothing(grammars):
    masker = GrammarMasker(grammars.compile(GrammarSpec("choice", '["yes", "no"]')))
    yes, mask = TOKENIZER.encode("yes"), np.zeros(128, np.int32)
    assert masker.ahead(yes[:1], mask) or len(yes) == 1
    assert not masker.ahead([*yes, yes[0]], mask)
    assert not masker.ahead(TOKENIZER.encode("q"), mask)
    assert masker.allows(yes[0])
    assert not masker.allows(TOKENIZER.encode("q")[0])
    assert [masker.accept(token_id) for token_id in yes][:-1] == [False] * (len(yes) - 1)


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
