"""Grammars of every alphabet, in tokens that are parts of characters: right texts, drafted or not."""

import json

import numpy as np
import pytest

from tests.runtime.grammar.world import TOKENIZER, Constrained, demo_drafter, generate, params_of, text_of
from tests.runtime.models import TREE, engine_config, new_engine
from tests.runtime.small_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.grammar.grammar_masker import GrammarMasker
from wingbeat.runtime.scheduling.request import GrammarSpec, Request

ALPHABETS = {
    "chinese": ("漢字", "漢語"),
    "accents": ("é", "ê"),
    "combining": ("e\u0301a", "e\u0300a"),
    "emoji": ("👩\u200d👩\u200d👧", "👩\u200d🚀"),
    "right to left": ("שלום", "שלוש"),
    "mixed": ("a漢é😀", "a漢é😁"),
}


def specs_of(texts):
    one, other = texts
    name = json.dumps(one, ensure_ascii=False)
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": one + other}}
    a_property = {
        "type": "object",
        "properties": {one: {"const": other}},
        "required": [one],
        "additionalProperties": False,
    }
    return {
        "choice": (GrammarSpec("choice", json.dumps(texts)), texts),
        "enum": (
            GrammarSpec("json", json.dumps({"enum": texts})),
            [json.dumps(one, ensure_ascii=False) for one in texts],
        ),
        "const": (GrammarSpec("json", json.dumps({"const": one}, ensure_ascii=False)), [name]),
        "key": (GrammarSpec("json", json.dumps(a_property)), None),
        "regex": (GrammarSpec("regex", f"(?:{one}|{other})"), texts),
        "grammar": (GrammarSpec("grammar", f'root ::= "{one}" | "{other}"'), texts),
        "structural_tag": (GrammarSpec("structural_tag", json.dumps(tag)), [one + other]),
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_answers_are_right_drafted_or_not(loaded, grammars, alphabet):
    cases = list(specs_of(ALPHABETS[alphabet]).values())
    params = [params_of(spec, seed, max_tokens=100) for seed, (spec, _) in enumerate(cases)]
    prompts = [TOKENIZER.encode("x = ")] * len(cases)
    plain, run = generate(loaded, grammars, prompts, params)
    for index, (_, allowed) in enumerate(cases):
        assert run.last[index].finish_reason == "stop"
        text = text_of(plain[index][:-1])
        if allowed is None:
            one, other = ALPHABETS[alphabet]
            assert json.loads(text) == {one: other}
        else:
            assert text in allowed
    alone = new_engine(loaded, engine_config(TREE, max_model_len=512, num_kv_blocks=300))
    try:
        assert Constrained(alone, grammars, prompts, params).finish() == plain
    finally:
        alone.model.remove_taps()
    assert generate(loaded, grammars, prompts, params, demo_drafter(TREE))[0] == plain


@pytest.mark.few(1)
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_another_engine_goes_on_inside_a_character(loaded, grammars, alphabet):
    spec, _ = specs_of(ALPHABETS[alphabet])["enum"]
    prompt, params = TOKENIZER.encode("x = "), params_of(spec, 3, max_tokens=100)
    (whole,), _ = generate(loaded, grammars, [prompt], [params])
    engine = new_engine(loaded, engine_config(max_model_len=512, num_kv_blocks=300), demo_drafter(TREE))
    rests = {str(cut): [] for cut in range(1, len(whole) - 1)}
    try:
        for cut in rests:
            request = Request(cut, tuple(prompt), params, output_token_ids=tuple(whole[: int(cut)]))
            engine.add_request(request, grammars.compile(spec))
        while engine.has_unfinished_requests():
            for output in engine.step():
                rests[output.request_id] += output.token_ids
    finally:
        engine.model.remove_taps()
    assert all(rest == whole[int(cut) :] for cut, rest in rests.items())


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_what_is_certain_inside_a_character_is_allowed(make, alphabet):
    """Each forced byte of a character is allowed, and the forced bytes lead to the end of the text."""
    tokenizer = make()
    of_model = tokenizer.hugging_face
    grammars = Grammars(tokenizer, len(of_model) + 64, frozenset([of_model.eos_token_id]))
    text = ALPHABETS[alphabet][0] * 3
    grammar = grammars.compile(GrammarSpec("choice", json.dumps([text])))
    texts = list(grammar.vocabulary.texts)
    single = [texts.index(bytes([byte])) for byte in text.encode()]
    for start in range(len(single)):
        masker = GrammarMasker(grammar, single[:start])
        written = b"".join(texts[token_id] for token_id in single[:start])
        while forced := masker.forced(5):
            for token_id in forced:
                masks = np.zeros((1, grammar.vocabulary.num_words), np.int32)
                masker.fill(np.zeros(1, np.int64), np.full(1, -1, np.int64), masks)
                assert not masker.accept(token_id)
                written += texts[token_id]
        assert text.encode().startswith(written)
        assert len(text.encode()) - len(written) < 4
