"""Every keyword of a JSON schema is enforced, or refused with its name and place; annotations are ignored."""

import enum
import json
import random
import re
from typing import Annotated, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field

from tests.runtime.grammar.walks import accepts, walk_text
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
    (an_object(additionalProperties=WHOLE, minProperties=2), "minProperties", "#"),
    (an_object(propertyNames={"maxLength": 2}), "propertyNames", "#"),
    ({"type": "object", "propertyNames": {"pattern": "a+", "maxLength": 2}}, "propertyNames", "#"),
    ({"type": "object", "unevaluatedProperties": False, "allOf": [an_object()]}, "unevaluatedProperties", "#"),
    ({"type": "number", "multipleOf": 0.01}, "multipleOf", "#"),
    ({"type": ["null", "array"], "items": {"type": "number", "multipleOf": 0.3}}, "multipleOf", "#/items"),
    ({"$ref": "https://example.com/schema.json"}, "$ref", "#"),
    ({"items": {"$ref": "#name"}, "$defs": {"a": {"$anchor": "name"}}}, "$ref", "#/items"),
    ({"$defs": {"a": {"not": {}}}, "type": "array", "items": {"$ref": "#/$defs/a"}}, "not", "#/items/$ref"),
    ({"$dynamicRef": "#a"}, "$dynamicRef", "#"),
    ({"type": "array", "prefixItems": [TEXT, {"type": "string", "format": "nothing"}]}, "format", "#/prefixItems/1"),
    ({"anyOf": [WHOLE, {"patternProperties": {"a": {"format": "uri-template"}}}]}, "format",
     "#/anyOf/1/patternProperties/a"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "keyword", "place"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_enforced_is_refused_by_name(grammars, schema, keyword, place):
    with pytest.raises(ValueError, match=r"^response_format has the keyword ") as caught:
        grammars.compile(spec_of(schema))
    assert f"keyword '{keyword}' at {place}, which " in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "("},
        {"anyOf": []},
        {"type": "integer", "maximum": 1, "minimum": 2},
        {"enum": ["a"], "maxLength": 0},
        {"$ref": "#/$defs/nothing"},
        {"type": "wrong"},
    ],
    ids=str,
)
def test_what_no_text_can_match_or_nothing_can_enforce_is_refused_with_the_reason(grammars, schema):
    with pytest.raises(ValueError, match=r"^response_format cannot be compiled: \w.{5,}"):
        grammars.compile(spec_of(schema))


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
    grammar = grammars.compile(GrammarSpec("json", schema, "response_format"))
    assert accepts(grammar, '["a"]')
    assert not accepts(grammar, "[1]")


EXPRESSIONS = [
    ("regex", r"\漢{2}", "漢漢", '""'),
    ("regex", r"[\漢-\漣x]\d", "漣4", '"4'),
    ("regex", r"[^\é]", '"', "é"),
    ("regex", r"\\\😀", "\\😀", "😀"),
    ("json", '{"type": "string", "pattern": "^\\\\漢$"}', '"漢"', '"""'),
    ("json", '{"type": "object", "patternProperties": {"^\\\\é$": {"type": "integer"}}, "additionalProperties": false}',
     '{"é":1}', '{"i":1}'),
    ("structural_tag", '{"type": "structural_tag", "format": {"type": "regex", "pattern": "\\\\é"}}', "é", "i"),
    # Classes of Rust's nest, subtract and intersect.
    ("regex", "[a&&b]{2}", "&b", "ab&"),
    ("regex", "[[a]b]", "[b]", "a"),
    ("regex", "[a~~b]", "~", "c"),
    ("regex", "[+--]", ",", "."),
    ("regex", "[---]", "-", "a"),
    ("regex", r"[\w.-[]+", "a[.A", "]"),
    ("regex", "[]a]", "]", "[]"),
    ("regex", r"\<a\>", "<a>", "a"),
    ("regex", "^a$", "a", "^a$"),
    # Readers disagree on whether classes hold Unicode's digits, letters and blanks.
    ("regex", r"\d", "1", "٣"),
    ("regex", r"\w", "a", "é"),
    ("regex", r"\W", "!", "é"),
    ("regex", r"[^\w]", "!", "é"),
    ("regex", r"[^\W]", "a", "é"),
    ("regex", r"\s", " ", "\u00a0"),
    ("regex", r"\S", "é", "\u00a0"),
]  # fmt: skip
"""Regular expressions of each kind, with texts that match and texts that do not."""


@pytest.mark.parametrize(("kind", "text", "good", "bad"), EXPRESSIONS)
def test_an_expression_matches_what_all_its_readers_say_that_it_matches(grammars, kind, text, good, bad):
    grammar = grammars.compile(GrammarSpec(kind, text, "structured_outputs"))
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


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
    {"type": "string", "format": "ipv4", "maxLength": 8},
    {"type": "integer", "format": "int32", "default": 7, "examples": [1], "x-mine": {"not": 1}},
    {"x-guidance": {"lenient": True, "item_separator": ";"}, "type": "array", "items": WHOLE, "minItems": 2},
    {"type": "string", "pattern": "^[\\x00-~]*$"},
    {"type": "string", "pattern": '["\\\\\n]', "maxLength": 9},
    {"type": "string", "pattern": "^[a-z]{1,129}$"},
    {"type": "string", "pattern": "^https?://"},
    {"type": "array", "maxItems": 2},
    {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 40}, "minItems": 1, "maxItems": 4},
    {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "boolean"}}},
    {"type": "number", "multipleOf": 0.25, "minimum": -3, "maximum": 3},
    {"allOf": [an_object(required=["a"]), {"properties": {"b": TEXT}, "required": ["b"]}]},
    {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "object", "unevaluatedProperties": False, "properties": {"a": WHOLE}},
    {"type": "string", "pattern": "a+", "maxLength": 3},
    {"$defs": {"a": TEXT}, "$ref": "#/$defs/a", "minLength": 3},
    {"type": "object", "patternProperties": {"^b": TEXT}, "properties": {"bc": {"maxLength": 2}}},
    {"required": ["b"], "type": "object"},
    {"minimum": 3, "type": ["integer", "null"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3, "uniqueItems": False},
    {"type": "array", "prefixItems": [WHOLE, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [WHOLE], "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "properties": {"a": WHOLE, "b": TEXT}, "maxProperties": 1, "additionalProperties": False},
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


@pytest.mark.few(20)
@pytest.mark.parametrize("schema", ACCEPTED, ids=lambda schema: json.dumps(schema)[:50])
def test_what_is_accepted_is_enforced(grammars, schema):
    """Random walks through the grammar are checked by an independent implementation of the schema."""
    grammar = grammars.compile(spec_of(schema))
    validator = jsonschema.Draft202012Validator(schema)
    num_whole = 0
    for seed in range(20):
        text = walk_text(grammar, random.Random(seed))
        if text is not None:
            num_whole += 1
            validator.validate(json.loads(text))
    assert num_whole


@pytest.mark.parametrize("more", [{}, {"maxLength": 10}, {"pattern": "^2"}], ids=str)
def test_a_format_is_enforced_with_a_length_and_a_pattern(grammars, more):
    grammar = grammars.compile(spec_of({"type": "string", "format": "date", **more}))
    found = [walk_text(grammar, random.Random(seed)) for seed in range(10)]
    assert any(found)
    assert all(re.fullmatch(r'"\d{4}-\d\d-\d\d"', text) for text in found if text)
    assert all(text.startswith('"2') for text in found if text and "pattern" in more)


def test_no_key_spells_a_propertys_name_in_other_letters(grammars):
    grammar = grammars.compile(spec_of({"type": "object", "properties": {"a": WHOLE}, "required": ["a"]}))
    assert accepts(grammar, '{"a":1,"b":"x"}')
    for key in ("a", r"\u0061"):
        assert not accepts(grammar, f'{{"a":1,"{key}":"x"}}')
