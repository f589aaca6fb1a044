"""vLLM's endpoint of token ids: the completions' tokens, in the form that its clients read."""

import pytest
from pydantic import SecretStr

from tests.deployments.http_world import TOKENIZER, FakePool, call, chunks
from wingbeat.deployments.api.access import Access
from wingbeat.runtime.scheduling.request import Request

GENERATE, RENDER = "/inference/v1/generate", "/v1/chat/completions/render"
PROMPT = TOKENIZER.encode("ab")


def generate(pool: FakePool, sampling: dict | None = None, status: int = 200, **fields) -> dict:
    body = {"token_ids": PROMPT, "sampling_params": sampling or {}, "model": "demo", **fields}
    answer = call(pool, GENERATE, body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_token_ids_become_token_ids():
    pool = FakePool("hello")
    got = generate(
        pool, {"max_tokens": 3, "temperature": 0.0, "stop": None}, request_id="r", speculation={"enabled": False}
    )
    (choice,) = got["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["logprobs"]) == (
        TOKENIZER.encode("hel"),
        "length",
        None,
    )
    assert (got["request_id"], got["model"], got["prompt_logprobs"]) == ("cmpl-r", "demo", None)
    assert got["usage"]["prompt_tokens"] == len(PROMPT)
    (request,) = pool.requests
    assert list(request.prompt_token_ids) == PROMPT
    assert (request.params.max_tokens, request.params.temperature, request.params.speculation) == (3, 0.0, False)


def test_without_a_limit_the_answer_may_fill_the_context():
    pool = FakePool("hello")
    assert generate(pool)["choices"][0]["finish_reason"] == "stop"
    assert pool.requests[0].params.max_tokens == pool.info.max_model_len - len(PROMPT)


def test_the_body_of_a_sample_with_log_probabilities():
    """SkyRL's body: vLLM's `output_kind`, null and neutral values, tokens named by their ids."""
    pool = FakePool("hello")
    sampling = {
        **{"n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 2, "seed": 5, "top_k": -1, "top_p": 1.0},
        **{"stop": ["zz"], "stop_token_ids": [0], "max_tokens": 4, "min_p": 0.0, "skip_special_tokens": True},
    }
    answer = call(pool, GENERATE, {"token_ids": PROMPT, "sampling_params": sampling, "cache_salt": "v3"})
    assert "x-wingbeat-ignored-fields" not in answer.headers
    got = answer.json()
    assert [choice["index"] for choice in got["choices"]] == [0, 1]
    for choice in got["choices"]:
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{one}" for one in choice["token_ids"]]
        assert all(one["logprob"] <= 0 for one in content)
    first, second = got["prompt_logprobs"]
    assert first is None
    assert str(PROMPT[1]) in second
    assert {request.params.cache_salt for request in pool.requests} == {"v3"}


def test_a_stream_carries_the_same_tokens():
    body = {"token_ids": PROMPT, "sampling_params": {}, "stream": True, "request_id": "r"}
    sent = chunks(call(FakePool("hello"), GENERATE, body))
    assert {chunk["request_id"] for chunk in sent} == {"cmpl-r"}
    choices = [choice for chunk in sent for choice in chunk["choices"]]
    assert [one for choice in choices for one in choice["token_ids"]] == [*TOKENIZER.encode("hello"), 0]
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "ab"}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [257]}, "token_ids"),
        ({"token_ids": [1] * 64}, "token_ids"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": 100}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"stop_token_ids": [257]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"flat_logprobs": True}}, "sampling_params.flat_logprobs"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"model": "other"}, "model"),
    ],
)
def test_a_wrong_field_is_named(fields, param):
    pool = FakePool()
    body = {"token_ids": PROMPT, "sampling_params": {}, **fields}
    answer = call(pool, GENERATE, body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert not pool.requests


def test_an_unknown_field_of_the_sampling_is_named_as_ignored():
    body = {"token_ids": PROMPT, "sampling_params": {"temprature": 0, "echo": True}}
    header = call(FakePool(), GENERATE, body).headers["x-wingbeat-ignored-fields"]
    assert header == "sampling_params.echo, sampling_params.temprature (temperature?)"


def test_a_key_is_needed():
    access = Access(api_keys=(SecretStr("k"),))
    for path in (GENERATE, RENDER):
        assert call(FakePool(), path, {}, access=access).status_code == 401


CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_completion_tokens": 5, "temperature": 0.5, "seed": 3}


def run(path: str, body: dict) -> tuple[Request, dict]:
    pool = FakePool("hello")
    answer = call(pool, path, body)
    assert answer.status_code == 200, answer.text
    (request,) = pool.requests
    return request, answer.json()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": True, "top_logprobs": 2, "stop": ["z"], "cache_salt": "s"},
        {"max_completion_tokens": None, "min_tokens": 2, "logit_bias": {"1": 2.0}, "priority": 1},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
    ],
)
def test_what_is_rendered_runs_as_the_chat_does(more):
    by_chat, chat = run("/v1/chat/completions", CHAT | more | {"return_token_ids": True})
    rendered = call(FakePool(), RENDER, CHAT | more).json()
    by_tokens, tokens = run(GENERATE, rendered)
    assert by_tokens.prompt_token_ids == by_chat.prompt_token_ids
    grammar = by_tokens.params.grammar
    assert (grammar and grammar[:2]) == (by_chat.params.grammar and by_chat.params.grammar[:2])
    same = ("max_tokens", "temperature", "seed", "logprobs", "min_tokens", "logit_bias", "priority", "cache_salt")
    assert [getattr(by_tokens.params, name) for name in same] == [getattr(by_chat.params, name) for name in same]
    assert tokens["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]


def test_images_are_not_rendered():
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    error = call(FakePool(), RENDER, {"messages": [{"role": "user", "content": parts}]}).json()["error"]
    assert error["param"].startswith("messages[0].content[0]")
