"""Answers match their grammar, and drafts change no token."""

import json
import random
import re

import jsonschema
import pytest

from tests.runtime.grammar.walks import accepts
from tests.runtime.grammar.world import (
    SPECS,
    TOKENIZER,
    Constrained,
    demo_drafter,
    generate,
    matches,
    params_of,
    text_of,
)
from tests.runtime.json_schemas import random_schema
from tests.runtime.models import CHAIN, TREE, engine_config, new_engine
from tests.runtime.scripted import ScriptedDrafter, random_tree, right_chain, right_tree
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.scheduling.request import GrammarSpec, Request


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [*SPECS[1:], SPECS[0]], ids=lambda spec: spec.kind)
def test_answers_match_and_drafts_change_no_token(loaded, grammars, spec):
    prompts = [TOKENIZER.encode(text) for text in ("import json\n", "x = ", "")] * 2
    prompts = [prompt or [5] for prompt in prompts]
    params = [params_of(spec, seed, temperature) for seed, temperature in enumerate([1.0, 1.0, 1.0, 0.0, 0.0, 0.7], 20)]
    plain, run = generate(loaded, grammars, prompts, params)
    for tokens, last in zip(plain, map(run.last.get, range(len(plain))), strict=True):
        if last.finish_reason == "stop":
            matches(spec, text_of(tokens))
    assert any(last.finish_reason == "stop" for last in run.last.values())
    sequences = [prompt + more + [1] * 8 for prompt, more in zip(prompts, plain, strict=True)]
    told = [(ScriptedDrafter(sequences, plan, loaded.vocab_size), TREE) for plan in (right_tree, random_tree)]
    for drafter, shape in [(demo_drafter(TREE), TREE), (demo_drafter(CHAIN), CHAIN), *told]:
        tokens, run = generate(loaded, grammars, prompts, params, drafter, shape)
        assert tokens == plain


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", [True, False])
def test_fixed_shapes_and_rounds_in_flight_change_no_token(loaded, grammars, overlap):
    prompts = [TOKENIZER.encode("value = ")] * len(SPECS)
    params = [params_of(spec, seed) for seed, spec in enumerate(SPECS)]
    plain, _ = generate(loaded, grammars, prompts, params)
    sequences = [prompt + more + [1] * 8 for prompt, more in zip(prompts, plain, strict=True)]
    for plan in (right_tree, random_tree):
        drafter = ScriptedDrafter(sequences, plan, loaded.vocab_size)
        engine = new_engine(
            loaded, engine_config(max_model_len=512, num_kv_blocks=300, overlap=overlap), drafter, on_host=False
        )
        try:
            assert Constrained(engine, grammars, prompts, params).finish() == plain
        finally:
            engine.model.remove_taps()


BEHIND_THOUGHTS = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "\n"},
            {"type": "regex", "pattern": "[0-9]{2}-[a-c]{3,5}"},
        ],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "plan"), [(CHAIN, right_chain), (TREE, right_tree)], ids=["chain", "tree"])
def test_a_grammar_may_begin_inside_a_draft(loaded, grammars, shape, plan):
    """Free text up to the end of a line, then a form; the drafter knows both, and drafts across the end."""
    spec = GrammarSpec("structural_tag", json.dumps(BEHIND_THOUGHTS))
    prompts, params = [TOKENIZER.encode("x = ")], [params_of(spec, 5)]
    plain, _ = generate(loaded, grammars, prompts, params)
    assert re.search(r"\n[0-9]{2}-[a-c]{3,5}$", text_of(plain[0][:-1] if plain[0][-1] == 0 else plain[0]))
    drafter = ScriptedDrafter([prompts[0] + plain[0] + [1] * 8], plan, loaded.vocab_size)
    engine = new_engine(loaded, engine_config(shape, max_model_len=512, num_kv_blocks=300), drafter)
    try:
        run, rounds = Constrained(engine, grammars, prompts, params), []
        while engine.has_unfinished_requests():
            before = len(run.tokens[0])
            run.step()
            rounds.append(run.tokens[0][before:])
    finally:
        engine.model.remove_taps()
    assert run.tokens == plain
    assert any("\n" in text_of(tokens[:-1]) for tokens in rounds)


@pytest.mark.slow
def test_masks_that_come_too_late_cost_speed_alone(loaded, grammars, monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.grammar.grammar_masker.MOST_TREE_S", 1e-9)
    prompts, params = [TOKENIZER.encode("x = ")], [params_of(SPECS[0], 3)]
    plain, _ = generate(loaded, grammars, prompts, params)
    tokens, _ = generate(loaded, grammars, prompts, params, demo_drafter(TREE))
    assert tokens == plain


@pytest.mark.slow
def test_another_engine_goes_on_in_the_middle_of_a_grammar(loaded, grammars):
    prompt, params = TOKENIZER.encode("x = "), params_of(SPECS[0], 4)
    (whole,), _ = generate(loaded, grammars, [prompt], [params])
    for cut in (1, len(whole) // 2, len(whole) - 1):
        engine = new_engine(loaded, engine_config(max_model_len=512, num_kv_blocks=300), demo_drafter(TREE))
        try:
            request = Request("0", tuple(prompt), params, output_token_ids=tuple(whole[:cut]))
            engine.add_request(request, grammars.compile(params.grammar))
            rest = []
            while engine.has_unfinished_requests():
                rest += [token for output in engine.step() for token in output.token_ids]
        finally:
            engine.model.remove_taps()
        assert rest == whole[cut:]


def test_what_was_generated_before_must_match(loaded, grammars):
    engine = new_engine(loaded, engine_config())
    try:
        spec = GrammarSpec("choice", '["yes"]')
        request = Request("0", (5,), params_of(spec), output_token_ids=tuple(TOKENIZER.encode("no")))
        with pytest.raises(ValueError, match="does not match the grammar"):
            engine.add_request(request, grammars.compile(spec))
        with pytest.raises(ValueError, match="no tokenizer"):
            engine.add_request(Request("1", (5,), params_of(spec)))
    finally:
        engine.model.remove_taps()


@pytest.mark.parametrize("choice", ["été", '"\\\n\t', "a\x00\x7f\u2028", "😀", "k🙂"])
def test_a_choice_is_written_as_it_stands(grammars, choice):
    assert accepts(grammars.compile(GrammarSpec("choice", json.dumps(["other", choice]))), choice)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json", "{"), ("json", '{"type": 7}'), ("regex", "[a"), ("grammar", "x"), ("structural_tag", "{}"), ("xml", "")],
)
def test_what_is_no_grammar_is_named(grammars, kind, text):
    with pytest.raises(ValueError, match=r"^response_format ") as caught:
        grammars.compile(GrammarSpec(kind, text, "response_format"))
    assert ".cc:" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("seed", "count"), [pytest.param(7, 32, marks=pytest.mark.slow), pytest.param(8, 168, marks=pytest.mark.soak)]
)
def test_random_schemas(loaded, grammars, seed, count):
    """Sampled at T = 1 by a model that writes code: every complete answer validates, drafts change nothing."""
    chance = random.Random(seed)
    schemas = [random_schema(chance) for _ in range(count)]
    num_complete = 0
    for start in range(0, len(schemas), 8):
        some = schemas[start : start + 8]
        specs = [GrammarSpec("json", json.dumps(schema)) for schema in some]
        params = [params_of(spec, seed) for seed, spec in enumerate(specs)]
        prompts = [TOKENIZER.encode("data = ")] * len(some)
        plain, run = generate(loaded, grammars, prompts, params)
        tokens, _ = generate(loaded, grammars, prompts, params, demo_drafter(TREE))
        assert tokens == plain
        for index, (schema, row) in enumerate(zip(some, plain, strict=True)):
            if run.last[index].finish_reason == "stop":
                num_complete += 1
                jsonschema.validate(json.loads(text_of(row)), schema)
    assert num_complete > 0.6 * count


def test_a_model_that_ends_no_text_takes_no_grammar_and_says_so(loaded):
    grammars = Grammars(TOKENIZER, loaded.vocab_size, frozenset())
    with pytest.raises(ValueError, match="cannot be used: the model names no token that ends a text"):
        grammars.compile(GrammarSpec("regex", "a+"))
