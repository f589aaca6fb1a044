"""Fields that mean nothing here: passed over, named in a header and the log, or refused where the server is strict."""

import asyncio
import logging

import httpx
import pytest

from tests.deployments.api.parsed_bodies import chat, completion, refused
from tests.deployments.http_world import FakePool, app_for, call
from tests.deployments.tool_world import ASSISTANT, PARSERS, TOKENIZER, TOOL, USER, WEATHER, ToolPool
from tests.needs import needs
from wingbeat.deployments.api.bodies.unserved_fields import HEADER, MOST_NAME_CHARS, MOST_NAMED, gather
from wingbeat.deployments.api.guard import HttpLimits

STRICT = HttpLimits(refuses_unknown_fields=True)
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 5},
    CHAT: {"messages": [USER], "max_tokens": 5},
    RESPONSES: {"input": "hi", "max_output_tokens": 5},
    MESSAGES: {"messages": [USER], "max_tokens": 5},
    "/tokenize": {"prompt": "hi"},
    "/v1/messages/count_tokens": {"messages": [USER]},
}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {}}
HINTS = {"request_id": "r", "session_id": "s", "store": True, "service_tier": "flex", "prompt_cache_key": "k"}
HINTS |= {"metadata": {"a": 1}, "cache_control": {"type": "ephemeral"}, "safety_identifier": "u", "user": {"id": 3}}
HINTS |= {"client_metadata": {"x": "y"}}


def ask(path: str, limits: HttpLimits | None = None, pool: FakePool | None = None, **fields) -> httpx.Response:
    body = {**BODIES[path], **fields}
    return call(pool or ToolPool("fine"), path, body, limits=limits, tokenizer=TOKENIZER, parsers=PARSERS)


def part(**fields) -> dict:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **fields}]}]}


def item(**fields) -> dict:
    return {"input": [{"role": "user", "content": "hi", **fields}]}


NESTED = [
    (COMPLETIONS, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (COMPLETIONS, {"response_format": {"type": "text", "schema": {"a": 1}}}, "response_format.schema"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "fast": True}}, "structured_outputs.fast"),
    (COMPLETIONS, {"speculation": {"mode": "tree"}}, "speculation.mode"),
    (CHAT, {"reasoning": {"effort": "low"}}, "reasoning"),
    (CHAT, {"thinking": {"type": "enabled", "x": 1}}, "thinking.x"),
    (CHAT, {"messages": [{**USER, "mood": "good"}]}, "messages[0].mood"),
    (CHAT, {"messages": [USER, {**ASSISTANT, "annotations": [{}]}, TOOL]}, "messages[1].annotations"),
    (CHAT, {"messages": [{**USER, "parts": ["x"]}]}, "messages[0].parts"),
    (CHAT, part(x=1), "messages[0].content[0].x"),
    (CHAT, {"tools": [{**WEATHER, "x": 1}]}, "tools[0].x"),
    (CHAT, {"tools": [{**WEATHER, "function": {**WEATHER["function"], "x": 1}}]}, "tools[0].function.x"),
    (
        CHAT,
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}, "x": 1}},
        "tool_choice.x",
    ),
    (RESPONSES, {"n": 2}, "n"),
    (RESPONSES, item(x=1), "input[0].x"),
    (RESPONSES, {"reasoning": {"effort": "low", "context": "all"}}, "reasoning.context"),
    (RESPONSES, {"text": {"format": {"type": "text"}, "tone": "dry"}}, "text.tone"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "x": 1}}}, "text.format.x"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": {}, "x": 1}]}, "tools[0].x"),
    (MESSAGES, {"n": 2}, "n"),
    (MESSAGES, {"messages": [{**USER, "x": 1}]}, "messages[0].x"),
    (MESSAGES, part(citations=[{"a": 1}]), "messages[0].content[0].citations"),
    (MESSAGES, {"tools": [{**ANTHROPIC_TOOL, "x": 1}]}, "tools[0].x"),
    (MESSAGES, {"thinking": {"type": "enabled", "x": 1}}, "thinking.x"),
]
LEFT_UNDONE = [
    (CHAT, {"verbosity": "low"}, "verbosity", "verbosity"),
    (CHAT, {"web_search_options": {}}, "web_search_options", "web_search_options"),
    (CHAT, {"tools": [{"type": "custom", "custom": {}}, WEATHER]}, "tools[0].type", "tools[0] (custom)"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity"),
    (RESPONSES, {"truncation": "auto"}, "truncation", "truncation"),
    (RESPONSES, {"include": ["x.y"]}, "include[0]", "include[0] (x.y)"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type", "tools[0] (web_search)"),
    (MESSAGES, {"context_management": {"edits": []}}, "context_management", "context_management"),
    (MESSAGES, {"mcp_servers": [{}]}, "mcp_servers", "mcp_servers"),
    (
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}, ANTHROPIC_TOOL]},
        "tools[0].type",
        "tools[0] (web_search_20250305)",
    ),
]


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_named_in_a_header_and_refused_where_the_server_is_strict(path):
    answer = ask(path, colour="red")
    assert (answer.status_code, answer.headers[HEADER]) == (200, "colour")
    strict = ask(path, STRICT, colour="red")
    assert strict.status_code == 400
    assert (strict.json()["error"]["param"], strict.json()["error"]["code"]) == ("colour", "unknown_parameter")
    assert HEADER not in ask(path).headers


@pytest.mark.few(6)
@pytest.mark.parametrize(("path", "fields", "name"), NESTED)
def test_unknown_fields_are_named_at_every_depth(path, fields, name):
    answer = ask(path, **fields)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, name), answer.text
    strict = ask(path, STRICT, **fields)
    assert strict.status_code == 400
    assert strict.json()["error"]["param"].replace(".function", "") in (name, name.replace(".function", ""))


@pytest.mark.parametrize(("path", "fields", "param", "named"), LEFT_UNDONE)
def test_what_is_left_undone_is_named_and_refused_where_the_server_is_strict(path, fields, param, named):
    answer = ask(path, **fields)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, named), answer.text
    strict = ask(path, STRICT, **fields)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("limits", [None, STRICT], ids=["ignore", "refuse"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_hints_that_cannot_change_a_text_are_accepted_without_a_word(path, limits):
    answer = ask(path, limits, **HINTS)
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers


@pytest.mark.parametrize(("path", "tool"), [(CHAT, WEATHER), (MESSAGES, ANTHROPIC_TOOL)], ids=["chat", "messages"])
def test_hints_are_accepted_at_every_depth(path, tool):
    cache = {"cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "id": "m1", **cache, "content": [{"type": "text", "text": "hi", **cache}]}]
    assert HEADER not in ask(path, STRICT, messages=messages, tools=[{**tool, **cache}]).headers
    assert ask(CHAT, STRICT, prediction={"type": "content", "content": "x"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_streams_carry_the_header_too(stream):
    answer = ask(CHAT, stream=stream, colour="red", max_token=3)
    assert answer.headers[HEADER] == "colour, max_token (max_tokens?)"


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("topp", "top_p"),
        ("stops", "stop"),
        ("colour", None),
    ],
)
def test_a_slip_of_a_known_name_says_which_was_meant(slip, meant):
    assert ask(COMPLETIONS, **{slip: 1}).headers[HEADER] == (f"{slip} ({meant}?)" if meant else slip)


def test_an_answer_that_is_an_error_names_them_too():
    answer = ask(CHAT, temprature=1, max_tokens=9000)
    assert (answer.status_code, answer.headers[HEADER]) == (400, "temprature (temperature?)")


@needs("parsing")
def test_what_is_ignored_changes_neither_the_prompt_nor_the_answer():
    plain, with_more = ToolPool("fine"), ToolPool("fine")
    fields = {"messages": [USER, ASSISTANT, TOOL], "tools": [WEATHER], "seed": 1}
    more = {
        "messages": [{**message, "x": 1, "cache_control": {"type": "ephemeral"}} for message in fields["messages"]],
        "tools": [{"type": "web_search"}, {**WEATHER, "x": 1, "function": {**WEATHER["function"], "y": 2}}],
        "max_token": 1,
    }
    answers = [ask(CHAT, pool=plain, **fields), ask(CHAT, pool=with_more, **{**fields, **more})]
    assert plain.prompt() == with_more.prompt()
    assert plain.requests[0].params == with_more.requests[0].params
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


def test_the_header_is_bounded_and_plain():
    fields = {f"field_{index}" + "x" * 1000: index for index in range(500)} | {"a\r\nX-Evil: 1, é": 1}
    header = ask(COMPLETIONS, **fields).headers[HEADER]
    assert header.startswith("a??X-Evil??1???, field_0xxx")
    assert header.endswith(f"..., {501 - MOST_NAMED} more")
    assert len(header) < (MOST_NAME_CHARS + 10) * MOST_NAMED
    assert "\r" not in header


def test_null_and_empty_values_ask_for_nothing():
    assert HEADER not in ask(COMPLETIONS, colour=None, shape=[], size={}).headers


def test_the_same_fields_are_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="wingbeat.deployments.api.guard")
    app = app_for(ToolPool("fine"), tokenizer=TOKENIZER, parsers=PARSERS)

    async def use() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://wingbeat") as client:
            for name in ("max_token", "max_token", "colour", "max_token"):
                assert (await client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], name: 1})).status_code == 200

    asyncio.run(use())
    lines = [record.getMessage() for record in caplog.records if "Ignored" in record.getMessage()]
    assert lines == [
        "Ignored in a request to /v1/completions: max_token (max_tokens?).",
        "Ignored in a request to /v1/completions: colour.",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": "end"},
        {"guided_json": {"type": "object"}},
        {"max_tokens": 0},
        {"temperature": 3},
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
    ],
)
def test_what_would_silently_be_another_text_stays_refused(fields):
    assert ask(COMPLETIONS, **fields).status_code == 400


def test_pages_of_other_origins_may_read_the_header():
    headers = {"Origin": "http://wingbeat"}
    answer = call(
        ToolPool("x"), COMPLETIONS, {**BODIES[COMPLETIONS], "colour": 1}, headers=headers, tokenizer=TOKENIZER
    )
    assert HEADER in answer.headers["access-control-expose-headers"]


def test_bodies_are_read_the_same_without_a_request_around_them():
    assert completion(colour=1).model_extra == {}
    assert refused(chat, strictly=True, colour=1).code == "unknown_parameter"


def test_what_threads_of_a_request_pass_over_is_the_requests():
    async def use() -> str:
        ignored = gather(refuses=False)
        await asyncio.to_thread(chat, colour=1)
        return str(ignored)

    assert asyncio.run(use()) == "colour"
