"""Anthropic's Messages API: a request becomes a chat, and the chat's answer becomes blocks and typed events."""

import httpx
import pytest
from pydantic import SecretStr

from tests.deployments.http_world import call
from tests.deployments.tool_world import ARGUMENTS, CALL, TOKENIZER, WEATHER, ToolPool, events, post
from tests.needs import needs
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.fleet.interface import EngineUnavailable

TOOL = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": WEATHER["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}
TEXT = f"<think>Let me see.</think>Well: {CALL}{CALL}"
HEADERS = {"x-api-key": "one", "anthropic-version": "2023-06-01"}
USER = {"role": "user", "content": "hi"}


def send(pool: ToolPool, path: str = "/v1/messages", **fields) -> httpx.Response:
    body = {"model": "demo", "max_tokens": 200, "messages": [USER], **fields}
    return post(pool, path, {name: value for name, value in body.items() if value is not None}, HEADERS)


def message(pool: ToolPool, **fields) -> dict:
    answer = send(pool, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


class TestRequests:
    def test_fields_become_those_of_a_chat(self):
        pool = ToolPool("Hello!")
        message(
            pool, system=[{"type": "text", "text": "Be kind."}], temperature=0.5, top_k=3, metadata={"user_id": "u"}
        )
        assert pool.prompt() == "<|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|>"
        params = pool.requests[0].params
        assert (params.max_tokens, params.temperature, params.top_k) == (200, 0.5, 3)

    def test_blocks_are_texts_thoughts_calls_and_their_results(self):
        pool = ToolPool("x")
        blocks = [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
        ]
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}
        messages = [
            USER,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        message(pool, messages=messages, tools=[TOOL])
        assert pool.prompt().endswith(
            '<|assistant|><think>hm</think>I look.<tool_call>{"name": "weather", "city": "Paris"}</tool_call><|end|>'
            "<|tool|>[t1]sunny<|end|><|user|>So?<|end|><|assistant|>"
        )

    def test_the_system_may_speak_among_the_messages(self):
        pool = ToolPool("x")
        reminder = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
        message(pool, system="Be kind.", messages=[USER, reminder, {"role": "assistant", "content": "yes"}, USER])
        assert pool.prompt() == (
            "<|system|>Be kind.<|end|><|user|>hi<|end|><|system|>Be brief.<|end|><|assistant|>yes<|end|>"
            "<|user|>hi<|end|><|assistant|>"
        )

    @pytest.mark.parametrize("behind", ["", "Be kind.\nAnd brief."])
    @pytest.mark.parametrize("form", ["text", "own block", "same block", "in messages"])
    def test_a_line_for_billing_is_no_part_of_the_prompt(self, form, behind):
        header = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"

        def fields(cch: str) -> dict:
            line = header.format(cch)
            joined, blocks = f"{line}\n{behind}", [{"type": "text", "text": text} for text in (line, behind)]
            match form:
                case "text":
                    return {"system": joined}
                case "own block":
                    return {"system": blocks}
                case "same block":
                    return {"system": [{"type": "text", "text": joined}]}
                case _:
                    return {"messages": [{"role": "system", "content": blocks}, USER]}

        prompts, counts = [], []
        for given in ({"system": behind}, fields("eb6c6"), fields("0aaa9")):
            pool = ToolPool("x")
            message(pool, **given)
            prompts.append(pool.prompt())
            counts.append(send(pool, "/v1/messages/count_tokens", max_tokens=None, **given).json())
        assert prompts[0] == prompts[1] == prompts[2]
        assert counts[0] == counts[1] == counts[2]

    def test_text_that_names_the_header_elsewhere_stays(self):
        pool, text = ToolPool("x"), "Why is there x-anthropic-billing-header: in it?\nx-anthropic-billing-header: a"
        message(pool, system=text, messages=[{"role": "user", "content": "x-anthropic-billing-header: b"}])
        assert pool.prompt().startswith(f"<|system|>{text}<|end|><|user|>x-anthropic-billing-header: b<|end|>")

    def test_an_assistant_that_spoke_last_goes_on(self):
        pool = ToolPool("x")
        message(pool, messages=[USER, {"role": "assistant", "content": "The answer is"}])
        assert pool.prompt().endswith("<|assistant|>The answer is")

    @needs("grammars")
    def test_a_form_and_an_effort_are_those_of_a_chat(self):
        pool, schema = ToolPool("x"), {"type": "object", "properties": {"a": {"type": "integer"}}}
        message(pool, output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
        assert pool.prompt().endswith("<|assistant|>low")
        assert '"a"' in pool.requests[0].params.grammar.text

    @pytest.mark.parametrize(("kind", "end"), [("enabled", "<think>"), ("disabled", "<|assistant|>")])
    def test_thinking_is_handed_to_the_template(self, kind, end):
        pool = ToolPool("x")
        message(pool, thinking={"type": kind, "budget_tokens": 1024})
        assert pool.prompt().endswith(end)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"max_tokens": None}, "max_tokens"),
            ({"max_tokens": 9000}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
            ({"messages": [USER, {"role": "system", "content": 5}]}, "messages[1].content"),
            ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source.type"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "a"}}]}]},
                "messages[0].content[0].type",
            ),
            (
                {"messages": [{"role": "assistant", "content": [{"type": "image", "source": {}}]}]},
                "messages[0].content[0].type",
            ),
            ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
            ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}, {"name": "f"}]}, "tools[1].input_schema"),
            (
                {
                    "tools": [{"type": "bash_20250124", "name": "bash"}],
                    "tool_choice": {"type": "tool", "name": "bash"},
                },
                "tool_choice",
            ),
            ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"inference_geo": "us"}, "inference_geo"),
            ({"temperature": -1}, "temperature"),
        ],
    )
    def test_what_is_not_served_is_refused_by_name_in_anthropics_form(self, fields, param):
        answer = send(ToolPool(), **fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["param"] == param

    @pytest.mark.parametrize(
        ("headers", "status", "kind"),
        [
            ({"x-api-key": "one"}, 200, None),
            ({"Authorization": "Bearer one"}, 200, None),
            ({"x-api-key": "two"}, 401, "authentication_error"),
            ({}, 401, "authentication_error"),
            ({"x-api-key": "one", "anthropic-version": "2026-10-21"}, 200, None),
        ],
    )
    def test_keys_come_in_anthropics_header_and_every_version_is_taken(self, headers, status, kind):
        body = {"max_tokens": 5, "messages": [USER]}
        access = Access(api_keys=(SecretStr("one"),))
        answer = call(ToolPool("x"), "/v1/messages", body, headers=headers, access=access, tokenizer=TOKENIZER)
        assert answer.status_code == status
        assert kind is None or answer.json()["error"]["type"] == kind

    def test_tokens_of_a_prompt_are_counted_as_they_will_be(self):
        pool = ToolPool("x")
        fields = {"system": "Be kind.", "tools": [TOOL]}
        used = message(pool, **fields)["usage"]
        counted = send(pool, "/v1/messages/count_tokens", max_tokens=None, **fields).json()
        assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


class TestAnswers:
    def test_thoughts_text_and_calls_are_blocks(self):
        got = message(ToolPool(TEXT), tools=[TOOL])
        thinking, text, *calls = got["content"]
        assert (got["type"], got["role"], got["stop_reason"]) == ("message", "assistant", "tool_use")
        assert thinking == {"type": "thinking", "thinking": "Let me see.", "signature": ""}
        assert text == {"type": "text", "text": "Well:"}
        assert [(block["name"], block["input"]) for block in calls] == [("weather", {"city": "Paris"})] * 2
        assert got["usage"]["cache_read_input_tokens"] == 1

    @pytest.mark.parametrize(("fields", "reason"), [({}, "end_turn"), ({"max_tokens": 2}, "max_tokens")])
    def test_why_a_message_ended(self, fields, reason):
        got = message(ToolPool("Hello!"), **fields)
        assert (got["stop_reason"], got["stop_sequence"]) == (reason, None)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_stop_sequence_that_ended_a_message_is_named(self, stream):
        answer = send(ToolPool("Hello!"), stop_sequences=["x", "lo"], stream=stream)
        got = events(answer)[-2][1]["delta"] if stream else answer.json()
        assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "lo")

    @pytest.mark.parametrize("tokens_per_output", [1, 7, 1000])
    def test_a_stream_tells_the_same_as_the_whole_message(self, tokens_per_output):
        told = events(send(ToolPool(TEXT, tokens_per_output), tools=[TOOL], stream=True))
        assert (told[0][0], told[-2][0], told[-1][0]) == ("message_start", "message_delta", "message_stop")
        assert all(data["type"] == name for name, data in told)
        whole = message(ToolPool(TEXT, tokens_per_output), tools=[TOOL])
        assert told[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert told[-2][1]["usage"] == whole["usage"]
        for index, block in enumerate(whole["content"]):
            mine = [(name, data) for name, data in told if data.get("index") == index]
            assert (mine[0][0], mine[-1][0]) == ("content_block_start", "content_block_stop")
            deltas = [data["delta"] for _, data in mine[1:-1]]
            name = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[block["type"]]
            expected = ARGUMENTS if block["type"] == "tool_use" else block[name]
            assert "".join(delta[name] for delta in deltas) == expected
            assert mine[0][1]["content_block"]["type"] == block["type"]

    def test_one_tool_at_a_time_where_several_are_not_wanted(self):
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        assert len(message(ToolPool(CALL + CALL), tools=[TOOL], tool_choice=choice)["content"]) == 1

    def test_an_error_before_the_first_event_is_a_status_and_a_later_one_an_event(self):
        pool = ToolPool("Hello")
        pool.fail_after = (0, EngineUnavailable("the engine died"))
        answer = send(pool, stream=True)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
        pool.fail_after = (1, EngineUnavailable("the engine died"))
        name, data = events(send(pool, stream=True))[-1]
        assert (name, data["error"]["message"]) == ("error", "the engine died")
        assert not pool.running


def test_a_server_without_parsers_answers_in_text():
    body = {"max_tokens": 100, "messages": [USER]}
    got = call(ToolPool("<think>a</think>b"), "/v1/messages", body, tokenizer=TOKENIZER).json()
    assert got["content"] == [{"type": "text", "text": "<think>a</think>b"}]
