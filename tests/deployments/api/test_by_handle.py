"""A router called through a Ray Serve handle: answers and errors of HTTP, without HTTP."""

import asyncio
import json
import pickle

import pytest

from tests.deployments.http_world import call
from tests.deployments.tool_world import PARSERS, TOKENIZER, USER, ToolPool
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import ApiError
from wingbeat.deployments.api.handles.calls import HandleCalls
from wingbeat.deployments.api.served_models import ServedModels

CHANGING = ("id", "created", "metrics", "seed")


class Calls(HandleCalls):
    def __init__(self, pool: ToolPool, refuses: bool = False) -> None:
        self._models = ServedModels(CompletionService(pool, TOKENIZER, PARSERS))
        self._refuses_unknown_fields = refuses


def steady(answer: dict) -> dict:
    return {name: value for name, value in answer.items() if name not in CHANGING}


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"return_token_ids": True}, {"n": 2}], ids=str)
def test_generate_is_the_answer_of_completions(fields: dict):
    body = {"prompt": "hi", "max_tokens": 4, **fields}
    over_http = call(ToolPool("fine"), "/v1/completions", body, tokenizer=TOKENIZER, parsers=PARSERS).json()
    by_handle = asyncio.run(Calls(ToolPool("fine")).generate(**body))
    assert steady(json.loads(json.dumps(by_handle))) == steady(over_http)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 1}], ids=str)
def test_chat_is_the_answer_of_chat_completions(fields: dict):
    body = {"messages": [USER], "max_tokens": 4, **fields}
    over_http = call(ToolPool("fine"), "/v1/chat/completions", body, tokenizer=TOKENIZER, parsers=PARSERS).json()
    assert steady(asyncio.run(Calls(ToolPool("fine")).chat(**body))) == steady(over_http)


def test_streams_are_server_sent_events_that_join_to_the_text():
    async def events(stream) -> list[dict]:
        told = b"".join([event async for event in stream]).decode()
        lines = [line.removeprefix("data: ") for line in told.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    calls = Calls(ToolPool("fine"))
    chunks = asyncio.run(events(calls.stream_generate("hi", max_tokens=4)))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "fine"
    chunks = asyncio.run(events(calls.stream_chat([USER], max_tokens=4)))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "fine"


def test_an_error_is_https_and_crosses_processes():
    with pytest.raises(ApiError) as refused:
        asyncio.run(Calls(ToolPool("fine")).generate("hi", model="another"))
    again = pickle.loads(pickle.dumps(refused.value))
    assert (again.status, again.param, str(again)) == (404, "model", str(refused.value))


def test_unknown_fields_are_ignored_or_refused_as_over_http():
    assert asyncio.run(Calls(ToolPool("fine")).generate("hi", nonsense=1))["choices"]
    with pytest.raises(ApiError, match="nonsense"):
        asyncio.run(Calls(ToolPool("fine"), refuses=True).generate("hi", nonsense=1))


def test_a_handle_chooses_among_several_models_by_name():
    one, two = ToolPool("from one"), ToolPool("from two")
    calls = Calls(one)
    calls._models = ServedModels(
        CompletionService(one, TOKENIZER, PARSERS), CompletionService(two, TOKENIZER, PARSERS, aliases=("second",))
    )
    answer = asyncio.run(calls.generate("x", model="second"))
    assert answer["choices"][0]["text"] == "from two"
