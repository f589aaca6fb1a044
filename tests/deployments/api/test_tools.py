"""Tools and thoughts of chat requests: to the template, out of the text, whole and in streams."""

import json

import pytest

from tests.deployments.http_world import call, chunks
from tests.deployments.tool_world import ARGUMENTS, ASSISTANT, CALL, TOKENIZER, TOOL, USER, WEATHER, ToolPool, chat
from wingbeat.deployments.api.bodies.unserved_fields import HEADER
from wingbeat.deployments.api.guard import HttpLimits
from wingbeat.deployments.api.parsed.reading import ChatParsers, chat_reader
from wingbeat.deployments.app_config import AppConfig


def refusal(response) -> tuple[str, str]:
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["code"]


def message(response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


class TestPrompt:
    def test_tools_and_their_results_reach_the_template_with_arguments_as_objects(self):
        pool = ToolPool("fine")
        assert message(chat(pool, messages=[USER, ASSISTANT, TOOL], tools=[WEATHER]))["content"] == "fine"
        prompt = pool.prompt()
        assert prompt.startswith('<tools>{"type": "function", "function": {"name": "weather", "description"')
        assert '<|assistant|><tool_call>{"name": "weather", "city": "Paris"}</tool_call><|end|>' in prompt
        assert prompt.endswith("<|tool|>[call_1]sunny<|end|><|assistant|>")

    def test_a_message_of_this_server_can_be_sent_back(self):
        pool = ToolPool(f"<think>hm</think>{CALL}")
        answer = message(chat(pool, tools=[WEATHER]))
        extra = {"annotations": [], "audio": None, "function_call": None, **answer}
        assert chat(pool, messages=[USER, extra, TOOL], tools=[WEATHER]).status_code == 200
        assert "<think>hm</think><tool_call>" in pool.prompt()

    @pytest.mark.parametrize(
        ("fields", "end"),
        [
            ({}, "<|user|>hi<|end|><|assistant|>"),
            ({"add_generation_prompt": False}, "<|user|>hi<|end|>"),
            ({"continue_final_message": True}, "<|user|>hi"),
            ({"chat_template_kwargs": {"enable_thinking": True}}, "<|assistant|><think>"),
            ({"reasoning_effort": "high"}, "<|assistant|>high"),
            (
                {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
                "<|assistant|>none<think>",
            ),
            ({"documents": [{"text": "doc"}]}, "(doc)<|assistant|>"),
        ],
    )
    def test_what_the_template_reads_is_handed_to_it(self, fields, end):
        pool = ToolPool("x")
        assert chat(pool, **fields).status_code == 200
        assert pool.prompt().endswith(end)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
            ({"continue_final_message": True, "messages": [USER, ASSISTANT]}, "continue_final_message"),
            ({"reasoning_effort": "huge"}, "reasoning_effort"),
            ({"documents": ["x"]}, "documents[0]"),
            ({"messages": [{**TOOL, "content": None}]}, "messages[0].content"),
            ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0]"),
            ({"messages": [{**ASSISTANT, "role": "user"}]}, "messages[0]"),
            ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, None),
            ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls"),
        ],
    )
    def test_what_no_template_can_read_is_refused_by_name(self, fields, param):
        found, code = refusal(chat(ToolPool(), **fields))
        assert found == param or (param is None and found.startswith("messages[0].tool_calls[0].function"))
        assert code in ("invalid_value", "invalid_type", "missing_required_parameter")


class TestChoice:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].function"),
            ({"tools": {"type": "function"}}, "tools"),
            ({"tools": [{"type": 5}]}, "tools[0].type"),
            ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
            ({"tools": [WEATHER] * 513}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": "always"}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": 1}, "tool_choice"),
        ],
    )
    def test_wrong_tools_and_choices_are_named(self, fields, param):
        assert refusal(chat(ToolPool(), **fields))[0] == param

    def test_tools_without_a_parser_reach_the_template_and_calls_come_back_as_text(self):
        pool = ToolPool()
        answer = message(chat(pool, parsers=ChatParsers(), tools=[WEATHER]))
        assert (answer["content"], answer.get("tool_calls")) == (CALL, None)
        assert "<tools>" in pool.prompt()

    def test_tools_that_the_model_would_never_see_are_refused(self):
        blind = ChatParsers(shows_tools=False)
        response = chat(ToolPool(), parsers=blind, tools=[WEATHER])
        assert refusal(response) == ("tools", "unsupported_value")
        assert "--tool-call-parser" in response.json()["error"]["message"]
        assert chat(ToolPool(), parsers=blind, tools=[]).status_code == 200
        assert chat(ToolPool(ARGUMENTS), parsers=blind, tools=[WEATHER], tool_choice="required").status_code == 200
        assert chat(ToolPool(), parsers=ChatParsers("hermes", shows_tools=False), tools=[WEATHER]).status_code == 200

    def test_tools_that_must_not_be_called_need_no_parser_and_are_not_looked_for(self):
        for parsers in (ChatParsers(), ChatParsers("hermes")):
            pool = ToolPool()
            answer = message(chat(pool, parsers=parsers, tools=[WEATHER], tool_choice="none"))
            assert answer["content"] == CALL
            assert "tool_calls" not in answer
            assert "<tools>" in pool.prompt()


class TestAnswers:
    def test_calls_and_thoughts_are_taken_out_of_the_text(self):
        answer = chat(ToolPool(f"<think>Let me see.</think>\n\n{CALL}\n{CALL}"), tools=[WEATHER]).json()["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        got = answer["message"]
        assert (got["content"], got["reasoning"], got["reasoning_content"]) == (None, "Let me see.", "Let me see.")
        calls = got["tool_calls"]
        assert [call["function"] for call in calls] == [{"name": "weather", "arguments": ARGUMENTS}] * 2
        assert len({call["id"] for call in calls}) == 2

    def test_an_answer_without_a_call_is_text(self):
        answer = chat(ToolPool("It rains."), tools=[WEATHER]).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == ("It rains.", "stop")
        assert "tool_calls" not in answer["message"]
        assert answer["message"]["reasoning"] is None

    def test_a_call_that_is_cut_off_says_so(self):
        answer = chat(ToolPool(), tools=[WEATHER], max_tokens=50).json()["choices"][0]
        assert answer["finish_reason"] == "length"
        assert ARGUMENTS.startswith(answer["message"]["tool_calls"][0]["function"]["arguments"])

    def test_one_call_alone_is_kept_where_several_are_not_wanted(self):
        fields = {"tools": [WEATHER], "parallel_tool_calls": False}
        assert len(message(chat(ToolPool(CALL + CALL), **fields))["tool_calls"]) == 1
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(chat(ToolPool(CALL + CALL), stream=True, **fields))]
        assert {call["index"] for delta in deltas for call in delta.get("tool_calls", [])} == {0}

    def test_thoughts_can_be_left_out(self):
        got = message(chat(ToolPool("<think>a</think>b"), include_reasoning=False))
        assert (got["content"], got.get("reasoning")) == ("b", None)

    def test_thoughts_that_the_prompt_opened_are_found(self):
        got = message(chat(ToolPool("a</think>b"), chat_template_kwargs={"enable_thinking": True}))
        assert (got["content"], got["reasoning"]) == ("b", "a")

    def test_marks_that_are_special_tokens_are_seen(self):
        assert message(chat(ToolPool("<think>a</think>b"), parsers=ChatParsers()))["content"] == "<think>a</think>b"

    @pytest.mark.parametrize("tokens_per_output", [1, 2, 5, 1000])
    def test_a_stream_brings_the_same_as_the_whole_answer(self, tokens_per_output):
        text = f"<think>Let me see.</think>Well: {CALL}{CALL}"
        whole = chat(ToolPool(text), tools=[WEATHER], n=2).json()
        stream = chunks(chat(ToolPool(text, tokens_per_output), tools=[WEATHER], n=2, stream=True))
        for index, choice in enumerate(whole["choices"]):
            mine = [c for chunk in stream for c in chunk["choices"] if c["index"] == index]
            deltas = [c["delta"] for c in mine]
            assert deltas[0]["role"] == "assistant"
            for name in ("content", "reasoning", "reasoning_content"):
                assert "".join(delta.get(name) or "" for delta in deltas) == choice["message"][name]
            calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
            for number, expected in enumerate(choice["message"]["tool_calls"]):
                own = [call for call in calls if call["index"] == number]
                assert (own[0]["type"], own[0]["function"]["name"]) == ("function", "weather")
                assert own[0]["id"].startswith("call_")
                assert all("id" not in call for call in own[1:])
                assert "".join(call["function"]["arguments"] for call in own) == expected["function"]["arguments"]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["tool_calls"]
            assert mine[-1]["finish_reason"] == "tool_calls"

    def test_a_parser_of_a_user_is_taken_by_import_path(self):
        parsers = ChatParsers("wingbeat.deployments.parsing.formats.mistral:MistralParser")
        got = message(chat(ToolPool(f"[TOOL_CALLS]weather{ARGUMENTS}"), parsers=parsers, tools=[WEATHER]))
        assert json.loads(got["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
        assert len(got["tool_calls"][0]["id"]) == 9


@pytest.mark.parametrize(
    ("name", "says"), [("hermit", "hermes, qwen"), ("no.such:Thing", "no"), ("json:loads", "derived"), ("json:x", "x")]
)
def test_a_parser_that_is_none_is_refused_with_those_that_are(name, says):
    for arguments in ((name, None), (None, name)):
        with pytest.raises(ValueError, match="_parser is") as caught:
            ChatParsers(*arguments)
        assert says in str(caught.value) or arguments[1]


class TestWithoutAForm:
    @pytest.mark.parametrize("name", ["mistral", "pythonic", None])
    def test_that_a_function_is_strict_is_passed_over_where_text_with_calls_has_no_form(self, name):
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
        body = {"messages": [USER], "tools": [WEATHER, strict]}
        answer = chat(ToolPool(), ChatParsers(name), **body)
        assert (answer.status_code, answer.headers[HEADER]) == (200, "tools[1] (strict)")
        limits = HttpLimits(refuses_unknown_fields=True)
        answer = call(
            ToolPool(), "/v1/chat/completions", body, tokenizer=TOKENIZER, parsers=ChatParsers(name), limits=limits
        )
        assert refusal(answer) == ("tools", "invalid_value")

    def test_arguments_without_types_have_those_of_the_requests_functions(self):
        text = "<tool_call>\n<function=weather>\n<parameter=city>\n75001\n</parameter>\n</function>\n</tool_call>"
        got = message(chat(ToolPool(text), ChatParsers("qwen3_coder"), tools=[WEATHER]))
        assert got["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "75001"}'}


def test_parsers_follow_from_the_chat_template_unless_they_are_named_or_none():
    template = "{{ tools }}<tool_call></think>"
    assert chat_reader(AppConfig(), template).names == ("hermes", "qwen3")
    named = AppConfig(tool_call_parser="none", reasoning_parser="deepseek_r1")
    assert chat_reader(named, template).names == (None, "deepseek_r1")
