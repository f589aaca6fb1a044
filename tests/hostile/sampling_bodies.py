"""Values of the fields that shape what is generated and what is reported of it: valid ones, and hostile ones."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from .case import Object, Raw
from .contract import BAD_GRAMMARS, COMPLETIONS, GOOD_GRAMMARS, SCHEMA, VOCAB_SIZE
from .values import NUMBERS, SHAPES, hostile, printable, string


def _ids(rng: Random) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 40)))]


def _word(rng: Random) -> str:
    return rng.choice(("import", " x", "def main", "\u00e9", "a" * 40, "\U0001f600", printable(rng) + "."))


SAMPLING: dict[str, Callable[[Random], Any]] = {
    "presence_penalty": lambda r: r.choice((0, 0.0, 0.5, -2, 2, Raw("-0.0"), None)),
    "frequency_penalty": lambda r: r.choice((0, 0.1, -2, 2.0, Raw("1e-320"), None)),
    "repetition_penalty": lambda r: r.choice((1, 1.0, 1.1, 0.01, 100, None)),
    "logit_bias": lambda r: r.choice(({}, None, {str(r.randrange(VOCAB_SIZE)): r.choice((-100, 100, 0.5, 0))})),
    "allowed_token_ids": lambda r: r.choice((None, None, _ids(r), list(range(VOCAB_SIZE)))),
    "bad_words": lambda r: r.choice((None, [], [_word(r)], [_word(r) for _ in range(30)])),
    "min_tokens": lambda r: r.choice((None, 0, 0, 1)),
    "stop_token_ids": lambda r: r.choice((None, [], _ids(r), list(range(90, 110)))),
    "include_stop_str_in_output": lambda r: r.choice((True, False, None)),
    "skip_special_tokens": lambda r: r.choice((True, False, None)),
    "add_special_tokens": lambda r: r.choice((None, None, True, False)),
    "return_token_ids": lambda r: r.choice((True, True, False, None)),
    "return_tokens_as_token_ids": lambda r: r.choice((True, False, None)),
    "prompt_logprobs": lambda r: r.choice((None, 0, 1, 20)),
    "truncate_prompt_tokens": lambda r: r.choice((None, -1, 1, 5, 2047, 100_000)),
    "priority": lambda r: r.choice((0, 1, -(2**31), 2**31 - 1, None)),
    "cache_salt": lambda r: r.choice((None, "a", printable(r), "x" * 1024)),
}


def add_sampling(rng: Random, fields: Object, target: str) -> None:
    """Set some of these fields to valid values."""
    for name, value in SAMPLING.items():
        if rng.random() < 0.07:
            fields.set(name, value(rng))
    if rng.random() < 0.15:
        if target == COMPLETIONS:
            fields.set("logprobs", rng.choice((None, False, 0, 1, 5, 20)))
        else:
            fields.set("logprobs", True)
            fields.set("top_logprobs", rng.choice((None, 0, 1, 20)))
    kind = rng.random()
    if kind < 0.06:
        fields.set("structured_outputs", rng.choice((None, *GOOD_GRAMMARS)))
    elif kind < 0.1:
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
        fields.set("response_format", rng.choice((None, {"type": "text"}, {"type": "json_object"}, schema)))


def spoil_sampling(rng: Random, fields: Object, target: str) -> None:
    """Give one or two of these fields a value that it cannot have, or can just have."""
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice((*HOSTILE, *HOSTILE, *SAMPLING))
        fields.set(name, HOSTILE[name](rng) if name in HOSTILE and rng.random() < 0.8 else hostile(rng))


def _edge_ids(rng: Random) -> Any:
    edges = (-1, 0, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31, 2**64, Raw("1.0"), True, None, "1", [1], Raw("1e2"))
    lists = ([], [1] * 1024, [1] * 1025, [1] * 2**14, [1] * (2**14 + 1), list(range(VOCAB_SIZE + 1)))
    return rng.choice(([rng.choice(edges)], [1, rng.choice(edges)], rng.choice(lists), rng.choice(SHAPES)))


def _edge_bias(rng: Random) -> Any:
    keys = ("1e3", "-1", "+1", " 1", "1 ", "01", "1.0", "", "\u0661", "1" * 5000, "4095", "4096", "99999999999", "0x1")
    biases = (-100, 100, Raw("100.00001"), -101, True, None, "1", [1], *NUMBERS)
    many = {str(i): 1 for i in range(rng.choice((1024, 1025)))}
    return rng.choice((Object([(rng.choice((*keys, "5")), rng.choice((1, rng.choice(biases))))]), many))


def _edge_words(rng: Random) -> Any:
    lists = (["a"] * 1024, ["a"] * 1025, ["x" * 1024], ["x" * 1025], ["ab" * 512] * 16, ["ab" * 512] * 17)
    return rng.choice((*lists, [""], [" "], ["\n\t"], [1], ["a", None], "word", ["\ud800"], [string(rng)]))


def _edge_grammar(rng: Random) -> Any:
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    values = (
        *BAD_GRAMMARS,
        *({}, {"regex": None}, {"regex": "a", "json_object": True}, {"json_object": False}, {"json_object": 1}),
        *({"regex": ""}, {"regex": "a" * 2**16}, {"regex": "a" * (2**16 + 1)}, {"regex": "(" * 5000 + ")" * 5000}),
        *({"regex": "a?" * 3000}, {"regex": "." * 3000}, {"regex": "((a{100}){100}){100}"}, {"regex": "\x00\ud800"}),
        *({"choice": []}, {"choice": [""]}, {"choice": "a"}, {"choice": [1]}, {"choice": [str(i) for i in range(400)]}),
        *({"json": deep}, {"json": ""}, {"json": True}, {"json": []}, {"json": {}}, {"json": {"enum": ["x"] * 20_000}}),
        *({"grammar": ""}, {"grammar": 'root ::= root root | ""'}, {"grammar": "root ::= " + "(" * 4000}),
        *({"json": _nested_schema(rng.choice((5, 30)))}, {"json": {"maxLength": 10**6, "type": "string"}}),
        *(
            {"colour": "a"},
            {"json_": "{}"},
            {"regex": 1},
            {"structural_tag": {}},
            {rng.choice(("json", "regex")): string(rng)},
        ),
    )
    return rng.choice(values)


def _nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        if len(json.dumps(schema)) > 3000:
            break
    return schema


def _edge_format(rng: Random) -> Any:
    schemas = ({}, {"name": "s"}, {"schema": {}}, {"schema": {"type": "nothing"}}, {"schema_": {}}, {"schema": 1}, [])
    values = (
        *({"type": "json_schema", "json_schema": schema} for schema in schemas),
        *({"type": "json_schema"}, {"type": "xml"}, {"type": "text", "schema": {}}, {"type": ["text"]}, {}, "text"),
        *({"type": "json_object", "json_schema": {"schema": {}}}, {"type": "structural_tag"}),
        {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"] * 20_000}}},
    )
    return rng.choice(values)


HOSTILE: dict[str, Callable[[Random], Any]] = {
    "presence_penalty": lambda r: r.choice(NUMBERS),
    "frequency_penalty": lambda r: r.choice(NUMBERS),
    "repetition_penalty": lambda r: r.choice((*NUMBERS, 0.009, 101)),
    "logit_bias": _edge_bias,
    "allowed_token_ids": _edge_ids,
    "stop_token_ids": _edge_ids,
    "bad_words": _edge_words,
    "min_tokens": lambda r: r.choice((*NUMBERS, 2, 9, 17, 2048)),
    "prompt_logprobs": lambda r: r.choice((*NUMBERS, 20, 21)),
    "logprobs": lambda r: r.choice((*NUMBERS, 20, 21, True, False)),
    "top_logprobs": lambda r: r.choice((*NUMBERS, 20, 21)),
    "truncate_prompt_tokens": lambda r: r.choice((*NUMBERS, -2, 0, 1, 2048)),
    "priority": lambda r: r.choice(NUMBERS),
    "cache_salt": lambda r: r.choice(("", "x" * 1024, "x" * 1025, string(r))),
    "structured_outputs": _edge_grammar,
    "response_format": _edge_format,
}
