"""Bodies with `structured_outputs` and `response_format` of every kind, mutated by seed and number."""

import json
from random import Random
from typing import Any

LETTERS = 'ab01xz"\\/[](){}|*+?.,:^$- \n\t#漢字é😀e\u0301\u05e9\u05dc\u202e\x00\x7f'
PIECES = (
    "a*", "(a|b)", "[a-z]{2,5}", "\\d+", "漢{2}", "(?:é|ê)", ".", "[^x]", "x?", "{0,1000}", "(", ")", "|", "\\",
    "(?=a)", "$", "^", "[", "]", "{3,1}", "😀",
)  # fmt: skip
RULES = (
    'root ::= "a" | b', "b ::= [a-z]+", 'b ::= "漢" b?', "c ::= c c", "b ::= b", 'root ::= "(" root ")" | ""',
    "b ::= [^a]{3}", 'c ::= "a"{100000}', "root ::= b c", "b ::=", 'root ::= "é" | "😀" b', "c ::= b | c",
)  # fmt: skip
KEYWORDS: dict[str, tuple[Any, ...]] = {
    "type": ("string", "integer", "number", "object", "array", "null", ["string", "null"], "nothing", 3),
    "enum": (["a", 1], ["漢字", "漢語"], [], [None, {"a": [1]}]),
    "const": ("é", 3, None, {"a": "😀"}),
    "minLength": (0, 2, -1, "3"),
    "maxLength": (0, 4, 100),
    "pattern": ("^a+$", "(", "[漢字]{1,3}"),
    "format": ("date", "ipv4", "nothing"),
    "minimum": (0, -3, 1e300, "a"),
    "maximum": (0, 12, -1e-9),
    "multipleOf": (2, 0, 0.5, 7),
    "uniqueItems": (True, False),
    "contains": ({"const": 1},),
    "minItems": (0, 1, 3),
    "maxItems": (0, 2),
    "required": (["a"], ["漢"], "a", []),
    "additionalProperties": (True, False, {"type": "integer"}),
    "minProperties": (0, 1, 2),
    "$ref": ("#", "#/$defs/x", "#/properties/a", "http://example.com", 3),
    "description": ("text", 3),
    "not": ({}, {"type": "null"}),
}


def body_of(seed: int, number: int) -> dict[str, Any]:
    """The fields of one request."""
    rng = Random(f"{seed}:{number}")
    kind = rng.choice(("json", "regex", "choice", "grammar", "json_object", "structural_tag"))
    value: Any = {
        "json": lambda: _schema(rng, 3),
        "regex": lambda: _mutated(rng, "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 8)))),
        "choice": lambda: [_text(rng) for _ in range(rng.randrange(4))],
        "grammar": lambda: _mutated(rng, "\n".join(["root ::= b c", *rng.sample(RULES, rng.randrange(1, 6))])),
        "json_object": lambda: rng.choice((True, True, False, 1)),
        "structural_tag": lambda: _tag(rng),
    }[kind]()
    if kind == "json" and rng.random() < 0.3:
        value = _mutated(rng, json.dumps(value, ensure_ascii=rng.random() < 0.5))
    if kind == "json" and rng.random() < 0.3:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}
    return {"structured_outputs": {kind: value}}


def _schema(rng: Random, depth: int) -> Any:
    if rng.random() < 0.05:
        return rng.choice((True, False, {}, None, []))
    names = rng.sample(sorted(KEYWORDS), rng.randrange(1, 4))
    schema = {name: rng.choice(KEYWORDS[name]) for name in names}
    if rng.random() < 0.6:
        schema["type"] = rng.choice(("object", "array", "string", "integer"))
    if depth and rng.random() < 0.5:
        schema["properties"] = {rng.choice(("a", "b", "漢", "e\u0301", "")): _schema(rng, depth - 1) for _ in range(2)}
    if depth and rng.random() < 0.3:
        schema["items"] = _schema(rng, depth - 1)
    if depth and rng.random() < 0.2:
        schema[rng.choice(("anyOf", "oneOf", "allOf"))] = [_schema(rng, depth - 1) for _ in range(rng.randrange(4))]
    if rng.random() < 0.2:
        schema["$defs"] = {"x": _schema(rng, 0)}
    return schema


def _tag(rng: Random) -> Any:
    form = rng.choice(
        (
            {"type": "const_string", "value": _text(rng)},
            {"type": "json_schema", "json_schema": _schema(rng, 1)},
            {"type": "sequence", "elements": [{"type": "const_string", "value": _text(rng)}, {"type": "any_text"}]},
            {"type": "or", "elements": [{"type": "regex", "pattern": rng.choice(PIECES)}]},
            {"type": "tag", "begin": _text(rng), "content": {"type": "any_text"}, "end": _text(rng)},
            {"type": _text(rng)},
        )
    )
    return {"type": rng.choice(("structural_tag", "structural_tag", "tag")), "format": form}


def _text(rng: Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(7)))


def _mutated(rng: Random, text: str) -> str:
    for _ in range(rng.choice((0, 0, 1, 3))):
        place = rng.randrange(len(text) + 1)
        cut = place + rng.randrange(3)
        text = text[:place] + rng.choice((rng.choice(LETTERS), text[place:cut] * 3, "")) + text[cut:]
    return text
