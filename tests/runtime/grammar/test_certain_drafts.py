"""Tokens that a grammar forces are drafted, whatever the drafter drafts and wherever that pays."""

import json

import pytest

from tests.runtime.grammar.world import (
    TOKENIZER,
    generate,
    params_of,
    wrong_chain,
)
from tests.runtime.models import CHAIN, TREE
from tests.runtime.scripted import ScriptedDrafter, wrong_tree
from wingbeat.runtime.grammar.grammar_masker import GrammarMasker
from wingbeat.runtime.scheduling.request import GrammarSpec


@pytest.mark.slow
def test_forced_tokens_are_drafted_without_the_drafter_knowing_them(loaded, grammars):
    """The drafter's own drafts are always wrong here; forced tokens are accepted all the same."""
    spec = GrammarSpec("choice", '["a long sentence that has only one way to go on once it has begun"]')
    prompt, params = TOKENIZER.encode("#"), params_of(spec, temperature=0.0)
    plain, _ = generate(loaded, grammars, [prompt], [params])
    for plan, shape in ((wrong_chain, CHAIN), (wrong_tree, TREE)):
        wrong = ScriptedDrafter([prompt + plain[0] + [1] * 8], plan, loaded.vocab_size)
        tokens, run = generate(loaded, grammars, [prompt], [params], wrong, shape)
        assert tokens == plain
        assert run.last[0].metrics.acceptance_length > 1.5


@pytest.mark.parametrize("answers_as_told", [True, False])
def test_a_long_constant_is_read_once_and_drafted_to_its_end(grammars, answers_as_told):
    """The constant's end is forced only once reached, because the model may write the same text in other tokens."""
    constant = " ".join(f"word{number}" for number in range(600))
    tokens = TOKENIZER.encode(constant, add_special_tokens=False)
    seen = []
    grammar = grammars.compile(GrammarSpec("json", json.dumps({"const": constant})))
    encode = grammar.vocabulary.encode
    vocabulary = grammar.vocabulary._replace(encode=lambda text: seen.append(len(text)) or encode(text))
    masker = GrammarMasker(grammar._replace(vocabulary=vocabulary))
    if not answers_as_told:
        for character in '"word0':
            masker.accept(*TOKENIZER.encode(character, add_special_tokens=False))
    num_drafted = 0
    while certain := masker.forced(6):
        assert len(certain) <= 6
        masker.accept(certain[0])
        num_drafted += 1
    assert num_drafted > 0.9 * len(tokens)
    assert max(seen) <= 2048
    assert len(seen) < num_drafted / 10
