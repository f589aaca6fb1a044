"""The name that a caller gives its request, as vLLM takes it."""

import pytest

from tests.deployments.http_world import TOKENIZER, FakePool, call
from tests.deployments.tool_world import PARSERS, USER, ToolPool

BODIES = {
    "/v1/completions": ({"prompt": "hi", "max_tokens": 5}, "cmpl-"),
    "/v1/chat/completions": ({"messages": [USER], "max_tokens": 5}, "chatcmpl-"),
}


def ask(path: str, pool: FakePool | None = None, **fields):
    body, _ = BODIES[path]
    return call(pool or ToolPool("fine"), path, body | fields, tokenizer=TOKENIZER, parsers=PARSERS)


@pytest.mark.parametrize("path", BODIES)
def test_an_answers_id_ends_by_the_callers_name_of_the_request(path: str) -> None:
    assert ask(path, request_id="my-7").json()["id"] == BODIES[path][1] + "my-7"
    first, second = (ask(path).json()["id"] for _ in range(2))
    assert first != second
    assert first.startswith(BODIES[path][1])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\nb", "ä", 7])
def test_a_name_that_no_log_could_carry_is_refused(path: str, name: object) -> None:
    answer = ask(path, request_id=name)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "request_id"


@pytest.mark.parametrize("path", BODIES)
def test_two_requests_of_one_name_are_two_for_the_engine(path: str) -> None:
    pool = ToolPool("fine")
    for _ in range(2):
        assert ask(path, pool, request_id="same").status_code == 200
    assert len({request.request_id for request in pool.requests}) == 2
