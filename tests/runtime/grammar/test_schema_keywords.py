"""Every keyword of a JSON schema is enforced, or refused with its name and place; annotations say nothing."""

import enum
import json
import random
import re
from typing import Annotated, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field
from xgrammar import GrammarMatcher

from tests.runtime.grammar.walks import walk_text
from wingbeat.runtime.scheduling.request import GrammarSpec

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def spec_of(schema):
    return GrammarSpec("json", json.dumps(schema), "response_format")


def an_object(**more):
    return {"type": "object", "properties": {"a": WHOLE}, **more}


REFUSED = [
    ({"type": "array", "items": TEXT, "contains": {"const": "a"}}, "contains", "#"),
    ({"type": "array", "items": TEXT, "uniqueItems": True}, "uniqueItems", "#"),
    ({"type": "object", "properties": {"x": {"not": TEXT}}}, "not", "#/properties/x"),
    (an_object(**{"if": {"required": ["a"]}, "then": {"required": ["b"]}}), "if", "#"),
    (an_object(dependentRequired={"a": ["b"]}), "dependentRequired", "#"),
    (an_object(dependentSchemas={"a": {"minProperties": 2}}), "dependentSchemas", "#"),
    (an_object(dependencies={"a": ["b"]}), "dependencies", "#"),
    (an_object(required=["b"]), "required", "#"),
    (an_object(additionalProperties=WHOLE, minProperties=2), "minProperties", "#"),
    (an_object(patternProperties={"^a": TEXT}), "patternProperties", "#"),
    (an_object(patternProperties={"^b": TEXT}, additionalProperties=True), "patternProperties", "#"),
    ({"type": "object", "patternProperties": {"^b": TEXT, "b$": WHOLE}}, "patternProperties", "#"),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": WHOLE}, "propertyNames", "#"),
    ({"type": "object", "propertyNames": {"pattern": "a+", "maxLength": 2}}, "maxLength", "#/propertyNames"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf", "#"),
    ({"type": "integer", "multipleOf": 7, "minimum": 1}, "multipleOf", "#"),
    ({"type": "integer", "multipleOf": 2000}, "multipleOf", "#"),
    ({"type": ["null", "array"], "items": {"type": "number", "multipleOf": 3}}, "multipleOf", "#/items"),
    ({"type": "string", "pattern": "a+", "maxLength": 3}, "maxLength", "#"),
    ({"type": "string", "pattern": "a+", "maxLength": 0}, "maxLength", "#"),
    ({"minimum": 3}, "minimum", "#"),
    ({"required": ["a"]}, "required", "#"),
    ({"$defs": {"a": TEXT}, "$ref": "#/$defs/a", "minLength": 3}, "minLength", "#"),
    ({"$ref": "https://example.com/schema.json"}, "$ref", "#"),
    ({"$defs": {"a": {"not": {}}}, "type": "array", "items": {"$ref": "#/$defs/a"}}, "not", "#/items/$ref"),
    ({"type": "object", "properties": {"a": WHOLE}, "anyOf": [{"type": "object"}]}, "properties", "#"),
    ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "type", "#"),
    ({"anyOf": []}, "anyOf", "#"),
    ({"allOf": [{"type": "object"}, {"type": "object"}]}, "allOf", "#"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "#"),
    ({"enum": ["a", 3], "type": "string"}, "type", "#"),
    ({"enum": ["a", "bcd"], "maxLength": 1}, "maxLength", "#"),
    ({"type": "array", "prefixItems": [TEXT, {"const": 1, "minimum": 3}]}, "minimum", "#/prefixItems/1"),
]


@pytest.mark.parametrize(("schema", "keyword", "place"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_enforced_is_refused_by_name(grammars, schema, keyword, place):
    with pytest.raises(ValueError, match=r"^response_format has the keyword ") as caught:
        grammars.compile(spec_of(schema))
    assert f"keyword '{keyword}' at {place}, which " in str(caught.value)


def test_schemas_of_structural_tags_are_held_to_the_same(grammars):
    form = {"type": "json_schema", "json_schema": {"type": "array", "items": WHOLE, "uniqueItems": True}}
    tag = json.dumps({"type": "structural_tag", "format": form})
    with pytest.raises(ValueError, match="'uniqueItems' at #"):
        grammars.compile(GrammarSpec("structural_tag", tag))


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "integer"}}',
        '{"type": "integer"} {"contains": {"const": 1}}',
        '{"type": "array", "contains": {"const": 1}} ,',
        '{"const": NaN}',
        '{"enum": [1, Infinity]}',
        "{'type': 'integer'}",
        '{"type": "integer"',
        "",
        '{"items": ' * 5000 + "{}" + "}" * 5000,
    ],
    ids=lambda text: text[:30],
)
@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_text_that_is_no_json_is_refused_whatever_another_reader_makes_of_it(grammars, kind, text):
    if kind == "structural_tag":
        text = f'{{"type": "structural_tag", "format": {{"type": "json_schema", "json_schema": {text}}}}}'
    with pytest.raises(ValueError, match=r"^response_format (is no JSON: |is nested too deeply|cannot be compiled: )"):
        grammars.compile(GrammarSpec(kind, text, "response_format"))


def test_of_equal_names_the_one_that_was_checked_is_enforced(grammars):
    schema = '{"type": "array", "items": {"type": "integer"}, "items": {"type": "string"}, "maxItems": 1}'
    compiled = grammars.compile(GrammarSpec("json", schema, "response_format")).compiled
    assert GrammarMatcher(compiled).accept_string('["a"]')
    assert not GrammarMatcher(compiled).accept_string("[1]")


BEHIND_A_BACKSLASH = [
    ("regex", r"\漢{2}", "漢漢", '""'),
    ("regex", r"[\漢-\漣x]\d", "漣4", '"4'),
    ("regex", r"[^\é]", '"', "é"),
    ("regex", r"\\\😀", "\\😀", "😀"),
    ("json", '{"type": "string", "pattern": "^\\\\漢$"}', '"漢"', '"""'),
    ("json", '{"type": "object", "patternProperties": {"^\\\\é$": {"type": "integer"}}}', '{"é":1}', '{"i":1}'),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "regex", "pattern": "\\\\é"}}', "é", "i"),
]
"""Of each kind an expression, what it matches, and what it does not: xgrammar takes such a character's lowest byte."""


@pytest.mark.parametrize(("kind", "text", "good", "bad"), BEHIND_A_BACKSLASH)
def test_a_character_of_any_alphabet_means_itself_behind_a_backslash(grammars, kind, text, good, bad):
    compiled = grammars.compile(GrammarSpec(kind, text, "structured_outputs")).compiled
    assert GrammarMatcher(compiled).accept_string(good)
    assert not GrammarMatcher(compiled).accept_string(bad)


class Colour(enum.StrEnum):
    RED = "red"
    GREEN = "green"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: Annotated[str, Field(min_length=1, max_length=5)]


class Owner(BaseModel):
    """An ordinary model."""

    name: str = Field(description="of the owner", examples=["Ada"])
    age: int | None = None
    colours: list[Colour] = Field(default_factory=list, max_length=3)
    pet: Cat | Dog
    best: Annotated[Annotated[Cat, Field()] | Annotated[Dog, Field()], Field(discriminator="kind")] | None = None
    friends: dict[str, int] = {}
    pair: tuple[int, bool] = (1, True)


STRICT = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "maxItems": 2},
        "answer": {"type": ["string", "null"], "description": "the end"},
    },
    "$defs": {
        "step": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 6}, "next": {"anyOf": [WHOLE, {"type": "null"}]}},
            "required": ["text", "next"],
            "additionalProperties": False,
        }
    },
    "required": ["steps", "answer"],
    "additionalProperties": False,
}
ACCEPTED = [
    {**STRICT, "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "x", "$comment": "y", "title": "t"},
    Owner.model_json_schema(),
    {"type": "integer", "minLength": 3, "pattern": "a", "contains": {}, "uniqueItems": True, "maximum": 40},
    {"type": "string", "minimum": 5, "items": False, "required": ["a"], "maxLength": 4},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "multipleOf": 7, "minimum": -20, "exclusiveMaximum": 50},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
    {"type": "number", "exclusiveMinimum": 0.25},
    {"type": "string", "pattern": "^[a-c]{2}-[0-9]+$"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "format": "ipv4", "maxLength": 5},
    {"type": "string", "format": "no-such-format", "default": 7, "examples": [1], "x-mine": {"not": 1}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3, "uniqueItems": False},
    {"type": "array", "prefixItems": [WHOLE, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [WHOLE], "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "properties": {"a": WHOLE, "b": TEXT, "c": {"const": 1}}, "minProperties": 2},
    {"type": "object", "properties": {"a": WHOLE, "b": TEXT}, "maxProperties": 1},
    {"type": "object", "properties": {"a": WHOLE}, "additionalProperties": {"type": "string", "maxLength": 3}},
    {"type": "object", "patternProperties": {"^[xy]{2}$": WHOLE}},
    {"type": "object", "properties": {"a": WHOLE}, "patternProperties": {"^x[0-9]$": {"type": "boolean"}}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]{1,2}$"}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": True},
    {"enum": ["a", None, 3, [1, {"b": 2}]], "title": "any of these"},
    {"enum": ["a", "b"], "type": "string", "minimum": 3},
    {"const": {"a": [1, "x"]}, "type": "object"},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}, {"const": None}]},
    {"type": "object", "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
        name: {"type": "object", "properties": {"t": {"const": name}}, "required": ["t"]} for name in ("a", "b")
    }},
    {"allOf": [{"type": "integer", "minimum": 3, "maximum": 12}], "description": "one"},
    {"properties": {"a": WHOLE}, "required": ["a"], "minLength": 3},
    True,
]  # fmt: skip


@pytest.mark.parametrize("schema", ACCEPTED, ids=lambda schema: json.dumps(schema)[:50])
def test_what_is_accepted_is_enforced(grammars, schema):
    """By random walks through the grammar, held against an independent reading of the schema."""
    compiled, texts = grammars.compile(spec_of(schema)).compiled, grammars.tokenizer_info.decoded_vocab
    validator = jsonschema.Draft202012Validator(schema)
    num_whole = 0
    for seed in range(20):
        text = walk_text(compiled, texts, random.Random(seed))
        if text is not None:
            num_whole += 1
            # Strings with a length may hold control characters as they are.
            validator.validate(json.loads(text, strict=False))
    assert num_whole


def test_a_format_is_enforced_or_an_annotation(grammars):
    texts = grammars.tokenizer_info.decoded_vocab
    for more, shape in (({}, r"\d{4}-\d\d-\d\d"), ({"maxLength": 5}, ".{0,5}"), ({"pattern": "^[ab]{3}$"}, "[ab]{3}")):
        compiled = grammars.compile(spec_of({"type": "string", "format": "date", **more})).compiled
        found = [walk_text(compiled, texts, random.Random(seed)) for seed in range(10)]
        assert any(found)
        assert all(re.fullmatch(f'"{shape}"', text, re.DOTALL) for text in found if text)
