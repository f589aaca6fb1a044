"""Answers match their grammar, and drafts change neither that nor any token."""

import json
import random
import re
from dataclasses import replace

import jsonschema
import pytest
import torch

from tests.runtime.json_schemas import random_schema
from tests.runtime.models import CHAIN, DEMO_PAIR, TREE, Run, engine_config, new_engine, reference
from tests.runtime.scripted import ScriptedDrafter, random_tree, right_chain, right_tree, wrong_tree
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.engine import calibration
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.grammar.maskers import GrammarMasker
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.scheduling.request import GrammarSpec, Request, SamplingParams
from wingbeat.runtime.speculation.costs import Scale
from wingbeat.runtime.speculation.policy import DraftPlan, Reason, SpeculationPolicy
from wingbeat.runtime.tokenizer import Tokenizer

LENGTH = 120
TOKENIZER = Tokenizer.load(DEMO_PAIR / "verifier")


@pytest.fixture(scope="module")
def loaded():
    return reference("demo", 1).loaded


@pytest.fixture(scope="module")
def grammars(loaded):
    return Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)


def demo_drafter(shape):
    target = TargetDescription.from_checkpoint(DEMO_PAIR / "verifier")
    return load_drafter(DEMO_PAIR / "drafter", target, shape, DrafterOptions(torch.float32, "cpu"))


class Constrained(Run):
    """Requests with a grammar each."""

    def __init__(self, engine, grammars, prompts, params):
        self.engine = engine
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(Request(str(index), tuple(prompt), param), grammars.compile(param.grammar))
        self.tokens, self.last = [[] for _ in prompts], {}


def generate(loaded, grammars, prompts, params, drafter=None, shape=TREE, **options):
    if drafter is None:
        params = [replace(param, speculation=False) for param in params]
    engine = new_engine(loaded, engine_config(shape, max_model_len=512, num_kv_blocks=300), drafter, **options)
    try:
        run = Constrained(engine, grammars, prompts, params)
        return run.finish(), run
    finally:
        engine.model.remove_taps()


def wrong_chain(upcoming, vocab_size, chance):
    return [((token_id + 1) % vocab_size, index) for index, token_id in enumerate(upcoming)]


def params_of(spec, seed=0, temperature=1.0, max_tokens=LENGTH, **fields):
    return SamplingParams(max_tokens, temperature, seed=seed, grammar=spec, **fields)


FIXED = {"type": "const_string", "value": "fixed text"}
SPECS = [
    GrammarSpec(
        "json",
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, '
        '"n": {"type": "integer"}, "kind": {"enum": ["left", "right"]}}, "required": ["name", "n", "kind"]}',
    ),
    GrammarSpec("regex", r"[a-f]{4,9}(-[0-9]{2,3}){1,2}"),
    GrammarSpec("choice", '["yes", "no", "perhaps \\"so\\""]'),
    GrammarSpec("grammar", 'root ::= "(" root ")" | [xyz]'),
    GrammarSpec("json_object", ""),
    GrammarSpec(
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "fixed text"}}),
    ),
]


def text_of(tokens):
    return TOKENIZER.decode([token for token in tokens])


def matches(spec, text):
    match spec.kind:
        case "json":
            jsonschema.validate(json.loads(text), json.loads(spec.text))
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "regex":
            assert re.fullmatch(spec.text, text)
        case "choice":
            assert text in json.loads(spec.text)
        case "grammar":
            assert re.fullmatch(r"\(*[xyz]\)*", text)
            assert text.count("(") == text.count(")")
        case "structural_tag":
            assert text == "fixed text"


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [*SPECS[1:], SPECS[0]], ids=lambda spec: spec.kind)
def test_answers_match_and_drafts_change_no_token(loaded, grammars, spec):
    prompts = [TOKENIZER.encode(text) for text in ("import json\n", "x = ", "")] * 2
    prompts = [prompt or [5] for prompt in prompts]
    params = [params_of(spec, seed, temperature) for seed, temperature in enumerate([1.0, 1.0, 1.0, 0.0, 0.0, 0.7])]
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


def test_forced_tokens_are_drafted_without_the_drafter_knowing_them(loaded, grammars):
    """The drafter here never proposes anything right; what the grammar forces is accepted all the same."""
    spec = GrammarSpec("choice", '["a long sentence that has only one way to go on once it has begun"]')
    prompt, params = TOKENIZER.encode("#"), params_of(spec, temperature=0.0)
    plain, _ = generate(loaded, grammars, [prompt], [params])
    for plan, shape in ((wrong_chain, CHAIN), (wrong_tree, TREE)):
        wrong = ScriptedDrafter([prompt + plain[0] + [1] * 8], plan, loaded.vocab_size)
        tokens, run = generate(loaded, grammars, [prompt], [params], wrong, shape)
        assert tokens == plain
        assert run.last[0].metrics.acceptance_length > 1.5


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


SENTENCE = GrammarSpec("choice", '["a long sentence that has only one way to go on once it has begun"]')


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_certain_tokens_are_drafted_without_a_drafter(loaded, grammars, temperature):
    """In one batch with requests that are not to be drafted for, or have nothing certain."""
    prompts = [TOKENIZER.encode("#")] * 3
    params = [params_of(SENTENCE, 1, temperature), params_of(SENTENCE, 2, temperature, speculation=False)]
    params.append(params_of(SPECS[1], 3, temperature))
    plain, _ = generate(loaded, grammars, prompts, params)
    for shape in (CHAIN, TREE):
        engine = new_engine(loaded, engine_config(shape, max_model_len=512, num_kv_blocks=300))
        try:
            run = Constrained(engine, grammars, prompts, params)
            assert run.finish() == plain
        finally:
            engine.model.remove_taps()
        assert run.last[0].metrics.acceptance_length > 1.5
        assert run.last[1].metrics.num_drafts == 0
        engine.check_integrity()


def test_certain_tokens_of_an_answer_that_may_have_few_more_are_not_drafted(loaded, grammars):
    prompt = TOKENIZER.encode("#")
    for most in (1, 2, 3):
        params = params_of(SENTENCE, temperature=0.0, max_tokens=most)
        plain, _ = generate(loaded, grammars, [prompt], [params])
        engine = new_engine(loaded, engine_config(TREE, max_model_len=512, num_kv_blocks=300))
        try:
            run = Constrained(engine, grammars, [prompt], [params])
            assert run.finish() == plain
        finally:
            engine.model.remove_taps()
        assert run.last[0].metrics.num_draft_tokens <= most - 1


class Plain(SpeculationPolicy):
    """Never asks for a tree."""

    reason = Reason.PLAIN

    def _plan(self, num_reqs, num_drafting, mean_context):
        self._token_s = 1e-3
        return DraftPlan(0, self.reason)


class ProbesPlain(Plain):
    reason = Reason.PROBE_PLAIN


@pytest.mark.parametrize(
    ("policy", "row_s", "is_drafted"),
    [(Plain, 1e-5, True), (Plain, 2e-3, False), (ProbesPlain, 1e-5, False)],
    ids=["cheap", "dear", "probed"],
)
def test_plain_rounds_draft_what_is_certain_where_that_pays(loaded, grammars, monkeypatch, policy, row_s, is_drafted):
    """A token is worth a millisecond here, and a row takes more or less than that."""
    verifier = calibration.VerifierTimes((1, 8), (0, 8), ((1e-3, 1e-3 + 8 * row_s),) * 2, (0.0, 0.0))
    drafter = calibration.DrafterTimes((2e-4, 2e-4), (1e-4, 1e-4))
    decisions = "wingbeat.runtime.engine.measured_speculation"
    monkeypatch.setattr(f"{decisions}.verifier_times", lambda *args: verifier)
    monkeypatch.setattr(f"{decisions}.drafter_times", lambda *args: drafter)
    monkeypatch.setattr(f"{decisions}.SpeculationPolicy", policy)
    monkeypatch.setattr(Scale, "observe", lambda *args: None)
    prompt, params = TOKENIZER.encode("import json"), params_of(SENTENCE)
    plain, _ = generate(loaded, grammars, [prompt], [params])
    shape = replace(TREE, adaptive=True)
    tokens, run = generate(loaded, grammars, [prompt], [params], demo_drafter(shape), shape)
    assert tokens == plain
    assert (run.last[0].metrics.num_accepted_tokens > 5) == is_drafted
    assert bool(run.last[0].metrics.num_drafts) == is_drafted
    assert run.engine.stats().plain_rounds.get(str(policy.reason), 0) > 0 or is_drafted
    # What a grammar brings about says nothing of the drafter.
    assert run.engine.stats().policy.num_accepted == 0


@pytest.mark.parametrize("answers_as_told", [True, False])
def test_a_long_constant_is_read_once_and_drafted_to_its_end(grammars, answers_as_told):
    """Its end is certain only once it is there, and the model may write the same text in other tokens."""
    constant = " ".join(f"word{number}" for number in range(600))
    tokens = TOKENIZER.encode(constant, add_special_tokens=False)
    seen = []
    grammar = grammars.compile(GrammarSpec("json", json.dumps({"const": constant})))
    masker = GrammarMasker(grammar._replace(encode=lambda text: seen.append(len(text)) or grammar.encode(text)))
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
    assert len(seen) < num_drafted / 100


def test_masks_that_come_too_late_cost_speed_alone(loaded, grammars, monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.grammar.maskers.MOST_TREE_S", 1e-9)
    prompts, params = [TOKENIZER.encode("x = ")], [params_of(SPECS[0], 3)]
    plain, _ = generate(loaded, grammars, prompts, params)
    tokens, _ = generate(loaded, grammars, prompts, params, demo_drafter(TREE))
    assert tokens == plain


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
        with pytest.raises(ValueError, match="breaks the grammar"):
            engine.add_request(request, grammars.compile(spec))
        with pytest.raises(ValueError, match="no tokenizer"):
            engine.add_request(Request("1", (5,), params_of(spec)))
    finally:
        engine.model.remove_taps()


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
