"""A request that an engine refuses is a 400 that names the field of its endpoint."""

import pytest

from tests.deployments.http_world import FakePool, call
from wingbeat.deployments.fleet.interface import RequestRefused

USER = {"role": "user", "content": "hi"}
BODIES = {
    "/v1/completions": ({"prompt": "hi"}, "prompt"),
    "/v1/chat/completions": ({"messages": [USER]}, "messages"),
    "/v1/messages": ({"messages": [USER], "max_tokens": 4}, "messages"),
    "/v1/responses": ({"input": "hi"}, "input"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_what_an_engine_says_of_a_prompt_names_the_field_that_it_came_in(path, stream):
    body, field = BODIES[path]
    pool = FakePool()
    pool.fail_after = (0, RequestRefused("prompt has 70 tokens: max_model_len 64 leaves no room for output"))
    answer = call(pool, path, {**body, "stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (field, "invalid_value")
    assert error["message"] == f"'{field}' has 70 tokens: max_model_len 64 leaves no room for output."


def test_other_fields_keep_their_names():
    pool = FakePool()
    pool.fail_after = (0, RequestRefused("structured_outputs.regex does not compile."))
    answer = call(pool, "/v1/chat/completions", {"messages": [USER]})
    assert answer.json()["error"]["param"] == "structured_outputs.regex"
