"""Random logits under a schema's grammar, run to the end of the text, give valid instances of the schema."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.runtime.grammar.walks import walk_text
from wingbeat.runtime.grammar.grammar_masker import GrammarMasker
from wingbeat.runtime.scheduling.request import GrammarSpec

NAMES = ("a", "b", "a b", 'q"', "\\", "é", "")
PATTERNS = ('["\\\\\n]', "^[a-z]{1,129}$", "^https?://", r"^\W\w\d\s\S$", "^[^a-y]{2}", "[a&&b]+$", "^(a|é)*$", "\t|x")
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """Random keywords that may be combined, some of which contradict each other."""
    kinds = [
        string,
        number,
        constant,
        lambda rng, depth: {},
        lambda rng, depth: {"type": rng.choice(("null", "boolean"))},
    ]
    if depth:
        kinds += [array, an_object, combined, referring]
    return rng.choice(kinds)(rng, depth - 1)


def simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(({}, {"type": "null"}, {"type": "boolean"}))


def string(rng: random.Random, depth: int) -> dict[str, Any]:
    more = [
        {"minLength": rng.randrange(4)},
        {"maxLength": rng.randrange(3, 30)},
        {"pattern": rng.choice(PATTERNS)},
        {"format": rng.choice(FORMATS)},
    ]
    return {"type": "string"} | merged(rng.sample(more, rng.choice((0, 1, 1, 2))))


def number(rng: random.Random, depth: int) -> dict[str, Any]:
    more = [
        {"minimum": rng.choice((-3, 0, 1.5, 1e6))},
        {"maximum": rng.choice((3, 12345, 1e7))},
        {"exclusiveMinimum": -7},
        {"exclusiveMaximum": 1e8},
        {"multipleOf": rng.choice((2, 0.5, 7))},
    ]
    return {"type": rng.choice(("integer", "number"))} | merged(rng.sample(more, rng.randrange(3)))


def constant(rng: random.Random, depth: int) -> dict[str, Any]:
    values = ["a", 'q"\n', 3, 1.5, None, True, {"a": [1, {}]}, [], "\u2028é😀"]
    return rng.choice(({"const": rng.choice(values)}, {"enum": rng.sample(values, 3)}))


def array(rng: random.Random, depth: int) -> dict[str, Any]:
    more = [
        {"items": random_schema(rng, depth)},
        {"prefixItems": [random_schema(rng, depth), random_schema(rng, depth)]},
        {"minItems": rng.randrange(3)},
        {"maxItems": rng.randrange(2, 4)},
        {"items": False},
    ]
    return {"type": "array"} | merged(rng.sample(more, rng.randrange(4)))


def an_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, 3)
    more = [
        {"required": rng.sample(NAMES, 2)},
        {"additionalProperties": rng.choice((False, {"type": "integer"}))},
        {"patternProperties": {"^[x-z]": random_schema(rng, depth)}},
        {"minProperties": rng.randrange(3)},
        {"maxProperties": rng.randrange(1, 5)},
    ]
    properties = {name: random_schema(rng, depth) for name in names}
    return {"type": "object", "properties": properties} | merged(rng.sample(more, rng.randrange(4)))


def combined(rng: random.Random, depth: int) -> dict[str, Any]:
    keyword = rng.choice(("anyOf", "oneOf", "allOf"))
    return {keyword: [random_schema(rng, depth) for _ in range(2)]} | rng.choice(({}, an_object(rng, 0)))


def referring(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/x~1y"}, "b": random_schema(rng, depth)}}


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, 60), pytest.param(2, 2000, marks=pytest.mark.slow), pytest.param(3, 30_000, marks=pytest.mark.soak)],
)
def test_whole_answers_are_instances_of_their_schemas(grammars, seed, count):
    num_served, num_whole, refusals = 0, 0, []
    for number in range(count):
        rng = random.Random(f"{seed}:{number}")
        schema = random_schema(rng)
        schema["$defs"] = {"x/y": random_schema(rng, 1)}
        try:
            grammar = grammars.compile(GrammarSpec("json", json.dumps(schema), "response_format"))
        except ValueError as error:
            refusals.append(str(error))
            continue
        num_served += 1
        for walk in range(4):
            text = walk_text(grammar, random.Random(walk))
            if text is not None:
                num_whole += 1
                assert_is_instance(text, schema)
    assert all(refusal.startswith("response_format ") for refusal in refusals)
    assert num_served > count / 3
    assert num_whole > num_served


def assert_is_instance(text: str, schema: Any) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        pytest.fail(f"{text!r} of {schema}")
    problems = list(jsonschema.Draft202012Validator(schema).iter_errors(value))
    assert not problems, f"{text!r} of {schema}"


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_a_tree_are_those_of_its_paths_one_by_one(grammars, seed):
    """Random trees along random texts; a forbidden node's row, and the rows below, stay empty."""
    rng = random.Random(seed)
    kind = rng.choice(
        [
            (
                "json",
                '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, "x"]}}}',
            ),
            ("regex", r"[a-f]{4,9}(-[0-9]{2,3}){1,2}"),
            ("grammar", 'root ::= "(" root ")" | [xyz]'),
        ]
    )
    grammar = grammars.compile(GrammarSpec(*kind))
    masker, texts = GrammarMasker(grammar), grammar.vocabulary.texts
    taken: list[int] = []
    for _ in range(12):
        nodes = [(0, -1)]
        for _ in range(9):
            nodes.append((rng.randrange(len(texts)) if rng.random() < 0.3 else -1, rng.randrange(len(nodes))))
        rows = np.zeros((len(nodes), grammar.vocabulary.num_words), np.int32)
        token_ids = np.array([token_id for token_id, _ in nodes])
        parents = np.array([parent for _, parent in nodes])
        paths: dict[int, list[int]] = {-1: []}
        expected: list[np.ndarray] = []
        for node, parent in enumerate(parents.tolist()):
            if token_ids[node] == -1:
                allowed = np.flatnonzero(np.unpackbits(expected[parent].view(np.uint8), bitorder="little"))
                token_ids[node] = rng.choice(allowed) if len(allowed) else 5
            paths[node] = [*paths[parent], *token_ids[node : node + (node > 0)].tolist()]
            expected.append(mask_behind(grammar, [*taken, *paths[node]]))
        assert masker.fill(token_ids, parents, rows)
        assert (rows == np.array(expected)).all()
        allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
        choice = int(rng.choice(allowed))
        if masker.accept(choice):
            break
        taken.append(choice)


def mask_behind(grammar, token_ids: list[int]) -> np.ndarray:
    """Allowed tokens behind some tokens; empty if these are forbidden or end the text."""
    masker, mask = GrammarMasker(grammar), np.zeros((1, grammar.vocabulary.num_words), np.int32)
    for token_id in token_ids:
        try:
            if masker.accept(token_id):
                return mask[0]
        except ValueError:
            return mask[0]
    masker.fill(np.zeros(1, np.int64), np.full(1, -1, np.int64), mask)
    return mask[0]
