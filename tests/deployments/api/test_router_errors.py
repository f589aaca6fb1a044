"""Errors of the HTTP surface: which status and body, for whom, and that nothing keeps running after one."""

import threading

import pytest

from tests.deployments.http_world import TOKENIZER, VOCAB_SIZE, FakePool, call, chat, chunks, complete
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.fleet.interface import EngineOverloaded, EngineUnavailable
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.tokenizer import TextTooLong


def message(text: str) -> dict:
    return {"role": "user", "content": text}


def recording(function, threads: dict[str, bool], name: str):
    """The function, which notes under its name whether it ran in another thread than the event loop's."""

    def run(*args, **kwargs):
        threads[name] = threading.current_thread() is not threading.main_thread()
        return function(*args, **kwargs)

    return run


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "param", "code"),
        [
            ({"prompt": "x" * 64}, "prompt", "context_length_exceeded"),
            ({"prompt": "x" * 60, "max_tokens": 5}, "max_tokens", "context_length_exceeded"),
            ({"prompt": [VOCAB_SIZE]}, "prompt", "invalid_value"),
            ({"prompt": [-1]}, "prompt", "invalid_value"),
            ({"prompt": [2**70]}, "prompt", "invalid_value"),
            ({"prompt": [10**4000]}, "prompt", "invalid_value"),
            ({"prompt": [5] * 65}, "prompt", "context_length_exceeded"),
            ({"prompt": [2**70] * 65}, "prompt", "context_length_exceeded"),
            ({"prompt": [[5], [5] * 100_000]}, "prompt", "context_length_exceeded"),
            ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ],
    )
    def test_bad_requests_are_told_what_is_wrong(self, fields, param, code):
        pool = FakePool()
        response = complete(pool, **fields)
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
        assert not pool.requests

    def test_length_errors_give_the_numbers(self):
        message = complete(FakePool(), prompt="x" * 60, max_tokens=5).json()["error"]["message"]
        assert all(number in message for number in ("64", "60", "5"))

    def test_what_just_fits_is_accepted(self):
        pool = FakePool()
        assert complete(pool, prompt="x" * 60, max_tokens=4).status_code == 200
        assert call(pool, "/v1/completions", {"model": "demo", "prompt": "x" * 60}).status_code == 200
        assert pool.requests[-1].params.max_tokens == 4

    def test_long_prompts_are_tokenized_and_refused(self):
        assert complete(FakePool(), prompt="x" * 20000).json()["error"]["code"] == "context_length_exceeded"

    def test_what_cannot_fit_is_not_tokenized(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(TOKENIZER, "hugging_face", None)
        with pytest.raises(TextTooLong):
            TOKENIZER.encode("x" * (64 * 5 + 1), max_tokens=64)

    @pytest.mark.parametrize("ask", [complete, chat])
    def test_a_prompt_that_cannot_fit_says_how_long_the_context_is(self, ask):
        long = "x" * 100_000
        error = ask(FakePool(), prompt=long) if ask is complete else ask(FakePool(), messages=[message(long)])
        error = error.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if ask is complete else "messages")
        assert "more than 64 tokens" in error["message"]

    @pytest.mark.parametrize("ask", [complete, chat])
    def test_long_bodies_and_texts_are_read_off_the_event_loop(self, monkeypatch: pytest.MonkeyPatch, ask):
        threads = {}
        for owner, name in ((TOKENIZER, "encode"), (CompletionBody, "parse"), (ChatBody, "parse")):
            monkeypatch.setattr(owner, name, recording(getattr(owner, name), threads, name))
        for text, off_loop in (("hi", False), ("x" * 100_000, True)):
            threads.clear()
            ask(FakePool(), prompt=text) if ask is complete else ask(FakePool(), messages=[message(text)])
            assert threads == dict.fromkeys(("encode", "parse"), off_loop)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [({"n": 5}, "n"), ({"n": 3, "prompt": ["a", "b"]}, "prompt"), ({"n": 5, "prompt": ["a", "b"]}, "n")],
    )
    def test_more_choices_than_can_ever_be_admitted_are_refused(self, fields, param):
        pool, body = FakePool(), {"model": "demo", "prompt": "hi", **fields}
        pool.max_requests = 4
        error = call(pool, "/v1/completions", body).json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_value")
        assert not pool.requests
        assert call(pool, "/v1/completions", {**body, "n": 2}).status_code == 200

    def test_malformed_json_and_unknown_paths_have_openais_body(self):
        assert call(FakePool(), "/v1/completions", b"{").json()["error"]["code"] == "invalid_json"
        missing = call(FakePool(), "/v1/rerank", {})
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
        assert call(FakePool(), "/v1/completions", method="GET").status_code == 405
        assert call(FakePool(), "/v1/models/other", method="GET").json()["error"]["code"] == "model_not_found"

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("n", [1, 3])
    def test_overload_is_a_503_that_says_when_to_retry(self, stream, n):
        pool = FakePool()
        pool.fail_after = (0, EngineOverloaded())
        response = complete(pool, stream=stream, n=n)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "engine_overloaded"
        assert not pool.running

    @pytest.mark.parametrize(
        ("error", "status"), [(EngineUnavailable("gone"), 503), (RuntimeError("secret detail"), 500)]
    )
    def test_failing_engines_are_server_errors(self, error, status):
        pool = FakePool()
        pool.fail_after = (1, error)
        response = complete(pool)
        assert (response.status_code, response.json()["error"]["type"]) == (status, "server_error")
        assert "secret" not in response.text

    def test_a_stream_that_breaks_ends_with_an_error_event(self):
        pool = FakePool()
        pool.fail_after = (2, EngineUnavailable("gone"))
        got = chunks(complete(pool, stream=True, n=2))
        assert got[-1]["error"]["message"] == "gone"
        assert not pool.running

    def test_one_failing_choice_ends_the_others(self):
        pool = FakePool()

        def answer(request: Request) -> str:
            if request.params.seed == 1:
                raise EngineUnavailable("gone")
            return "x" * 30

        pool._answer = answer
        assert complete(pool, n=3, seed=0).status_code == 503
        assert not pool.running
        assert len(pool.aborted) == 3

    def test_health_follows_the_pool(self):
        pool = FakePool()
        assert call(pool, "/health", method="GET").status_code == 200
        pool.alive = False
        assert call(pool, "/health", method="GET").status_code == 503
