"""Whatever a body asks of an answer's form: an answer that matches it, or a 400 that names the field."""

import json
import re
import resource

import jsonschema
import pytest

from tests.runtime.grammar.world import TOKENIZER, demo_drafter
from tests.runtime.models import TREE, engine_config, new_engine, reference
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.errors import ApiError
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.grammar.trial import GrammarTrial
from wingbeat.runtime.scheduling.request import Request, SamplingParams

from .grammar_fuzz import body_of

MOST_GROWTH_MIB = 600
BATCH, LENGTH = 16, 24


def parsed(fields):
    """The grammar that a body asks for, or its 400."""
    try:
        body = CompletionBody.parse(json.dumps({"model": "m", "prompt": "x", **fields}).encode())
        return body.sampling_params(4096, TOKENIZER).grammar, None
    except ApiError as error:
        return None, error


def named(message, spec):
    assert message.startswith((f"{spec.field} ", f"{spec.field}.")), message


def check_text(spec, fields, text):
    """As far as Python can tell."""
    if spec.kind in ("json", "json_object"):
        value = json.loads(text, strict=False)
        if spec.kind == "json":
            schema = json.loads(spec.text)
            jsonschema.Draft202012Validator(schema).validate(value)
        else:
            assert isinstance(value, dict)
    elif spec.kind == "choice":
        assert text in fields["structured_outputs"]["choice"]
    elif spec.kind == "regex" and not re.search(r"[$^]", spec.text):
        try:
            expression = re.compile(spec.text, re.DOTALL)
        except re.error:
            return
        assert expression.fullmatch(text)


def run_batch(loaded, cases, trial, grammars):
    """Returns how many answers were whole."""
    engine = new_engine(
        loaded, engine_config(TREE, max_num_seqs=BATCH, max_model_len=512, num_kv_blocks=600), demo_drafter(TREE)
    )
    taken, texts, num_whole = {}, {}, 0
    try:
        for number, fields in cases:
            spec, refusal = parsed(fields)
            if spec is None:
                assert refusal.status == 400
                assert re.split(r"[.\[]", refusal.param)[0] in ("structured_outputs", "response_format"), fields
                continue
            try:
                trial.check(spec)
                grammar = grammars.compile(spec)
            except ValueError as error:
                named(str(error), spec)
                continue
            params = SamplingParams(LENGTH, 1.0, seed=number, grammar=spec)
            engine.add_request(Request(str(number), tuple(TOKENIZER.encode("x = ")), params), grammar)
            taken[str(number)], texts[str(number)] = (spec, fields), []
        while engine.has_unfinished_requests():
            for output in engine.step():
                spec, fields = taken[output.request_id]
                texts[output.request_id] += output.token_ids
                if output.failure is not None:
                    assert output.is_refusal, (fields, output.failure)
                    named(output.failure, spec)
                elif output.finish_reason == "stop":
                    num_whole += 1
                    check_text(spec, fields, TOKENIZER.decode(texts[output.request_id]))
        engine.check_integrity()
    finally:
        engine.model.remove_taps()
    return num_whole


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (1, 50),
        pytest.param(3, 1000, marks=pytest.mark.slow),
        pytest.param(2, 20_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_every_form_is_matched_or_refused_by_name(seed, count):
    loaded = reference("demo", 1).loaded
    grammars = Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)
    trial, num_whole = GrammarTrial(grammars, cpu_s=1), 0
    trial.warm()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for start in range(0, count, BATCH):
            cases = [(number, body_of(seed, number)) for number in range(start, min(start + BATCH, count))]
            num_whole += run_batch(loaded, cases, trial, grammars)
    finally:
        trial.close()
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < MOST_GROWTH_MIB
    assert num_whole > count / 30
