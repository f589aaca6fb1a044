"""Requests with grammars on the demo pair."""

import json
import re
from dataclasses import replace

import jsonschema
import torch

from tests.runtime.models import DEMO_PAIR, TREE, Run, engine_config, new_engine
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.scheduling.request import GrammarSpec, Request, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer

LENGTH = 120
TOKENIZER = Tokenizer.load(DEMO_PAIR / "verifier")


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
