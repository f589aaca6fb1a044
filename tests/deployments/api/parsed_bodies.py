"""Bodies of completions and chats, read as a request's would be."""

import json
from contextlib import nullcontext

import pytest

from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.bodies.unserved_fields import none_ignored
from wingbeat.deployments.api.errors import ApiError

COMPLETION = {"model": "m", "prompt": "hi"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def completion(**fields) -> CompletionBody:
    return CompletionBody.parse(json.dumps({**COMPLETION, **fields}).encode())


def chat(**fields) -> ChatBody:
    return ChatBody.parse(json.dumps({**CHAT, **fields}).encode())


def refused(parse, strictly: bool = False, **fields) -> ApiError:
    """The error of a body; `strictly` as where unknown fields are refused by setting."""
    with none_ignored() if strictly else nullcontext(), pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["type"] == "invalid_request_error"
    return caught.value
