"""Formats that answers with tools and reasoning are constrained to."""

import json

import pytest

from tests.deployments.api.test_tools import message, refusal
from tests.deployments.http_world import chunks
from tests.deployments.tool_world import ARGUMENTS, WEATHER, ToolPool, chat
from wingbeat.deployments.api.parsed.reading import ChatParsers


def form_of(response, pool: ToolPool) -> dict:
    """The output format that the engine was constrained to."""
    assert response.status_code == 200, response.text
    grammar = pool.requests[-1].params.grammar
    assert grammar.kind == "structural_tag"
    return json.loads(grammar.text)["format"]


class TestForms:
    def test_a_call_that_must_be_made_is_written_in_the_models_own_format(self):
        pool = ToolPool()
        response = chat(pool, ChatParsers("hermes"), tools=[WEATHER], tool_choice="required")
        form = form_of(response, pool)
        assert (form["type"], form["at_least_one"], form["stop_after_first"]) == ("tags_with_separator", True, False)
        assert form["tags"][0]["content"]["json_schema"] == WEATHER["function"]["parameters"]
        assert message(response)["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}

    def test_the_one_function_that_must_be_called_is_the_only_one_in_the_form(self):
        pool, other = ToolPool(), {"type": "function", "function": {"name": "other"}}
        choice = {"type": "function", "function": {"name": "weather"}}
        form = form_of(chat(pool, ChatParsers("hermes"), tools=[other, WEATHER], tool_choice=choice), pool)
        assert ["weather" in tag["begin"] for tag in form["tags"]] == [True]
        assert form["stop_after_first"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_server_without_a_parser_asks_for_a_list_of_calls(self, stream):
        pool = ToolPool(f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]')
        response = chat(pool, ChatParsers(), tools=[WEATHER], tool_choice="required", stream=stream)
        assert form_of(response, pool)["elements"][0] == {"type": "const_string", "value": "["}
        if stream:
            deltas = [call for c in chunks(response) for call in c["choices"][0]["delta"].get("tool_calls", [])]
            assert (deltas[0]["function"]["name"], deltas[0]["index"]) == ("weather", 0)
            assert "".join(call["function"]["arguments"] for call in deltas) == ARGUMENTS
        else:
            assert message(response)["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}

    def test_a_server_without_a_parser_asks_for_the_arguments_of_the_one_function(self):
        pool, choice = ToolPool(ARGUMENTS), {"type": "function", "function": {"name": "weather"}}
        response = chat(pool, ChatParsers(), tools=[WEATHER], tool_choice=choice)
        assert form_of(response, pool)["json_schema"] == WEATHER["function"]["parameters"]
        assert message(response)["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}

    def test_only_strict_functions_bind_text_that_may_have_calls(self):
        pool = ToolPool()
        assert chat(pool, ChatParsers("hermes"), tools=[WEATHER]).status_code == 200
        assert pool.requests[-1].params.grammar is None
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
        other = {
            "type": "function",
            "function": {"name": "other", "parameters": {"type": "object", "maxProperties": 1}},
        }
        form = form_of(chat(pool, ChatParsers("hermes"), tools=[strict, other]), pool)
        assert form["type"] == "triggered_tags"
        schemas = [tag["content"]["json_schema"] for tag in form["tags"]]
        assert schemas == [WEATHER["function"]["parameters"], {"type": "object"}]

    def test_two_forms_of_one_answer_are_refused(self):
        fields = {"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"json_object": True}}
        assert refusal(chat(ToolPool(), **fields)) == ("tool_choice", "invalid_value")

    @pytest.mark.few(4)
    @pytest.mark.parametrize("name", ["hermes", "mistral", "pythonic", None])
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
    @pytest.mark.parametrize("kind", ["json_object", "json_schema"])
    def test_a_forced_call_has_no_text_that_a_response_format_could_shape(self, name, choice, kind):
        schema = {"json_schema": {"name": "x", "schema": {"type": "object"}}} if kind == "json_schema" else {}
        forms = []
        for fields in ({}, {"response_format": {"type": kind, **schema}}):
            pool = ToolPool()
            answer = chat(pool, ChatParsers(name), tools=[WEATHER], tool_choice=choice, **fields)
            assert answer.status_code == 200, answer.text
            forms.append(form_of(answer, pool))
        assert forms[0] == forms[1]

    def test_an_answer_with_strict_functions_and_a_response_format_is_a_call_or_of_the_format(self):
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
        pool = ToolPool()
        answer = chat(pool, ChatParsers("hermes"), tools=[strict], response_format={"type": "json_object"})
        calls, text = form_of(answer, pool)["elements"]
        assert calls["tags"][0]["content"]["json_schema"] == WEATHER["function"]["parameters"]
        assert text["json_schema"] == {"type": "object"}

    @pytest.mark.parametrize(
        ("fields", "form"),
        [
            ({"response_format": {"type": "json_object"}}, "json_schema"),
            ({"structured_outputs": {"choice": ["a", "b"]}}, "or"),
            ({"structured_outputs": {"regex": "a+"}}, "regex"),
            ({"structured_outputs": {"json": "{}"}}, "json_schema"),
            ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar"),
        ],
    )
    def test_thoughts_come_before_any_form(self, fields, form):
        pool = ToolPool("<think>a</think>{}")
        response = chat(pool, ChatParsers(None, "qwen3"), chat_template_kwargs={"enable_thinking": True}, **fields)
        thoughts, answer = form_of(response, pool)["elements"]
        assert (thoughts["type"], answer["type"]) == ("sequence", form)
        chat(pool, ChatParsers(), **fields)
        assert pool.requests[-1].params.grammar.kind != "structural_tag"

    def test_a_form_that_cannot_stand_behind_thoughts_is_refused(self):
        for value in ({"json": "{"}, {"structural_tag": {"type": "structural_tag", "structures": [], "triggers": []}}):
            response = chat(ToolPool(), ChatParsers(None, "qwen3"), structured_outputs=value)
            assert refusal(response) == ("structured_outputs", "invalid_value")
