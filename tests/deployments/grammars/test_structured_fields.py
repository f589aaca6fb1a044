"""Structured outputs over HTTP: the grammar that reaches the engine, and refusals that name the caller's field."""

import json

import pytest

from tests.deployments.http_world import FakePool, chat, complete

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"json": SCHEMA}}, "json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json"),
    ],
    ids=str,
)
def test_the_engine_is_given_the_grammar(fields, kind):
    pool = FakePool()
    assert complete(pool, **fields).status_code == 200
    assert pool.requests[0].params.grammar.kind == kind


@pytest.mark.few(3)
@pytest.mark.parametrize("call", [complete, chat], ids=["completions", "chat"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= nothing"}}, "structured_outputs.grammar"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
            "response_format",
        ),
    ],
    ids=["regex", "grammar", "schema"],
)
def test_a_grammar_that_does_not_compile_is_a_400_that_names_the_field(call, stream, fields, param):
    pool = FakePool()
    response = call(pool, stream=stream, n=2, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert f"'{param}' cannot be compiled: " in error["message"]
    assert not pool.num_admitted


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/missing"},
        {"enum": []},
        {"type": ["nothing"]},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "(a)\\1"},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"type": "object", "minProperties": 1, "maxProperties": 0},
        {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_compiled_is_a_400(schema):
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
    ):
        response = complete(FakePool(), **fields)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "invalid_value")
        assert error["param"] == ("response_format" if "response_format" in fields else "structured_outputs.json")
        assert "cannot be compiled: " in error["message"]


@pytest.mark.parametrize("value", [1, False, "true"])
def test_json_object_is_true_or_left_out(value):
    response = complete(FakePool(), structured_outputs={"json_object": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("structured_outputs")


@pytest.mark.parametrize("schema", [{"name": "s"}, {"schema_": {}}, {"schema": "{}"}])
def test_a_format_without_a_schema_is_refused(schema):
    response = complete(FakePool(), response_format={"type": "json_schema", "json_schema": schema})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("response_format.json_schema")


def test_two_fields_that_shape_the_answer_contradict_each_other():
    both = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    assert complete(FakePool(), **both).json()["error"]["param"] == "structured_outputs"
