"""OpenAI's Responses API: a request becomes a chat, and the chat's answer becomes items and typed events."""

import asyncio
import json

import httpx
import openai
import openai.types.responses.response_create_params as schema
import pytest

from tests.deployments.http_world import URL, app_for
from tests.deployments.tool_world import ARGUMENTS, CALL, PARSERS, TOKENIZER, WEATHER, ToolPool, events, post
from wingbeat.deployments.api.bodies.unserved_fields import WITHOUT_EFFECT
from wingbeat.deployments.api.responses_api.body import ResponsesBody
from wingbeat.deployments.fleet.interface import EngineUnavailable

TOOL = {"type": "function", **WEATHER["function"]}
TEXT = f"<think>Let me see.</think>Well: {CALL}{CALL}"


def respond(pool: ToolPool, **fields) -> httpx.Response:
    return post(pool, "/v1/responses", {"model": "demo", "input": "hi", **fields})


def response(pool: ToolPool, **fields) -> dict:
    answer = respond(pool, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def with_client(pool: ToolPool, use):
    async def run():
        app = app_for(pool, tokenizer=TOKENIZER, parsers=PARSERS)
        http_client = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        client = openai.AsyncOpenAI(api_key="x", base_url=URL + "/v1", http_client=http_client, max_retries=0)
        async with client:
            return await use(client)

    return asyncio.run(run())


def test_no_field_of_the_openai_schema_is_unknown():
    known = set(ResponsesBody.model_fields) | set(ResponsesBody.unserved) | WITHOUT_EFFECT
    assert set(schema.ResponseCreateParamsBase.__annotations__) <= known
    fields = {**dict.fromkeys(known), "input": "hi"}
    assert ResponsesBody.parse(json.dumps(fields).encode()).as_chat().messages[0].content == "hi"


class TestRequests:
    def test_a_text_with_instructions_is_a_short_chat(self):
        pool = ToolPool("Hello!")
        got = response(pool, instructions="Be kind.", max_output_tokens=50, temperature=0, seed=5)
        assert pool.prompt() == "<|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|>"
        params = pool.requests[0].params
        assert (params.max_tokens, params.temperature, params.seed) == (50, 0.0, 5)
        assert (got["object"], got["status"], got["instructions"], got["seed"]) == (
            "response",
            "completed",
            "Be kind.",
            5,
        )
        assert got["metrics"]["speculative_decoding"]["num_drafts"] == 2

    def test_items_are_messages_calls_and_their_results(self):
        pool = ToolPool("x")
        items = [
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS, "id": "fc_1"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ]
        response(pool, input=items, tools=[TOOL])
        assert pool.prompt().endswith(
            "<|system|>Be kind.<|end|><|user|>Weather?<|end|><|assistant|><think>hm</think>I look."
            '<tool_call>{"name": "weather", "city": "Paris"}</tool_call><|end|>'
            "<|tool|>[c1]sunny<|end|><|assistant|>"
        )

    def test_the_output_of_one_request_is_input_of_the_next(self):
        pool = ToolPool(TEXT)
        output = response(pool, tools=[TOOL])["output"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
            for item in output
            if item["type"] == "function_call"
        ]
        response(pool, input=[{"role": "user", "content": "hi"}, *output, *results], tools=[TOOL])
        assert "<|assistant|><think>Let me see.</think>Well:<tool_call>" in pool.prompt()

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"background": True}, "background"),
            ({"conversation": "c"}, "conversation"),
            ({"input": []}, "input"),
            ({"input": 3}, "input"),
            ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
            ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
                "input[0].content[0].file_id",
            ),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
                "input[0].content[0].type",
            ),
            ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].input_audio"),
            (
                {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "data:"}]}]},
                "input[0].content[0].type",
            ),
            ({"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
            ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
            ({"tools": [{"type": "function"}]}, "tools[0].name"),
            ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
            ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
            ({"tools": [{"type": "custom", "name": "x"}], "tool_choice": "required"}, "tool_choice"),
            ({"include": ["message.output_text.logprobs"]}, "include[0]"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 9000}, "max_output_tokens"),
            ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
            ({"text": {"format": {"type": "grammar"}}}, "text.format"),
            ({"temperature": 5}, "temperature"),
            ({"model": "other"}, "model"),
        ],
    )
    def test_what_is_not_served_is_refused_by_name(self, fields, param):
        answer = respond(ToolPool(), **fields)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param


class TestAnswers:
    def test_thoughts_text_and_calls_are_items(self):
        got = response(ToolPool(TEXT), tools=[TOOL])
        thoughts, message, *calls = got["output"]
        assert thoughts["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
        assert (message["role"], message["content"][0]["text"]) == ("assistant", "Well:")
        assert [(call["name"], call["arguments"]) for call in calls] == [("weather", ARGUMENTS)] * 2
        assert {item["status"] for item in got["output"]} == {"completed"}
        assert len({call["call_id"] for call in calls}) == 2
        usage = got["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] == 1
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]

    def test_an_answer_that_is_cut_off_says_so(self):
        got = response(ToolPool("Hello!"), max_output_tokens=3)
        assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert got["output"][0]["status"] == "incomplete"

    @pytest.mark.parametrize("tokens_per_output", [1, 7, 1000])
    def test_a_stream_tells_the_same_as_the_whole_response(self, tokens_per_output):
        told = events(respond(ToolPool(TEXT, tokens_per_output), tools=[TOOL], stream=True))
        assert [name for name, _ in told[:2]] == ["response.created", "response.in_progress"]
        assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
        assert all(data["type"] == name for name, data in told)
        final = told[-1][1]["response"]
        assert told[-1][0] == "response.completed"
        whole = response(ToolPool(TEXT, tokens_per_output), tools=[TOOL])
        assert [without_ids(item) for item in final["output"]] == [without_ids(item) for item in whole["output"]]
        done = [data["item"] for name, data in told if name == "response.output_item.done"]
        assert done == final["output"]
        for index, item in enumerate(final["output"]):
            mine = [(name, data) for name, data in told if data.get("output_index") == index]
            assert (mine[0][0], mine[-1][0]) == ("response.output_item.added", "response.output_item.done")
            text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert "".join(data["delta"] for name, data in mine if name.endswith(".delta")) == text
            assert {data["item_id"] for _, data in mine[1:-1]} == {item["id"]}

    def test_openais_client_reads_whole_responses_and_streams(self):
        async def use(client):
            whole = await client.responses.create(model="demo", input="hi", tools=[TOOL])
            async with client.responses.stream(model="demo", input="hi", tools=[TOOL]) as stream:
                kinds = [event.type async for event in stream]
                return whole, kinds, await stream.get_final_response()

        whole, kinds, final = with_client(ToolPool(TEXT), use)
        assert whole.output_text == final.output_text == "Well:"
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
        assert kinds[-1] == "response.completed"

    def test_an_error_before_the_first_event_is_a_status_and_a_later_one_an_event(self):
        pool = ToolPool("Hello")
        pool.fail_after = (0, EngineUnavailable("the engine died"))
        assert respond(pool, stream=True).status_code == 503
        pool.fail_after = (1, EngineUnavailable("the engine died"))
        name, data = events(respond(pool, stream=True))[-1]
        assert (name, data["response"]["status"]) == ("response.failed", "failed")
        assert data["response"]["error"] == {"code": "engine_unavailable", "message": "the engine died"}
        assert not pool.running


def without_ids(item: dict) -> dict:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}
