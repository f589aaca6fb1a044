"""The HTTP surface over scripted engines: shapes, streams, stop strings, errors, and that nothing keeps running."""

import asyncio
import json
from collections.abc import Callable

import httpx
import openai
import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wingbeat.deployments.completion_service import CompletionService
from wingbeat.deployments.engine_interface import ModelInfo
from wingbeat.deployments.errors import EngineOverloaded, EngineUnavailable
from wingbeat.deployments.router import create_app
from wingbeat.runtime.request import FinishReason, Request, RequestOutput, SpeculationMetrics
from wingbeat.runtime.tokenizer import Tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
URL = "http://wingbeat"


def byte_tokenizer() -> Tokenizer:
    """One token per byte, after one special token."""
    entries = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = BackendTokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=CHAT_TEMPLATE)
    return Tokenizer(fast)


TOKENIZER = byte_tokenizer()
VOCAB_SIZE = 257


class FakePool:
    """Answers a request with a script's text, a few tokens at a time; remembers what was asked and what was aborted."""

    def __init__(self, answer: Callable[[Request], str] | str = "hello world", tokens_per_output: int = 2) -> None:
        self.info = ModelInfo("demo", max_model_len=64, vocab_size=VOCAB_SIZE, drafter="fake")
        self._answer = answer if callable(answer) else lambda _request: answer
        self._tokens_per_output = tokens_per_output
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.alive = True
        self.hang_after: int | None = None
        """Outputs after which a request waits for ever."""
        self.fail_after: tuple[int, Exception] | None = None
        """Outputs after which a request fails, and how."""

    def healthy(self) -> bool:
        return self.alive

    async def generate(self, request: Request):
        self.requests.append(request)
        self.running.add(request.request_id)
        finished = False
        try:
            token_ids = [*TOKENIZER.encode(self._answer(request)), 0][: request.params.max_tokens]
            finish = FinishReason.STOP if token_ids[-1] == 0 else FinishReason.LENGTH
            for count, start in enumerate(range(0, len(token_ids), self._tokens_per_output)):
                await self._mishap(count)
                some = tuple(token_ids[start : start + self._tokens_per_output])
                finished = start + len(some) == len(token_ids)
                if finished:
                    metrics = SpeculationMetrics(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
                    yield RequestOutput(request.request_id, some, finish, metrics, num_cached_tokens=1)
                else:
                    yield RequestOutput(request.request_id, some)
        finally:
            self.running.discard(request.request_id)
            if not finished:
                self.aborted.add(request.request_id)

    async def _mishap(self, count: int) -> None:
        await asyncio.sleep(0)
        if self.hang_after is not None and count >= self.hang_after:
            await asyncio.Event().wait()
        if self.fail_after is not None and count >= self.fail_after[0]:
            raise self.fail_after[1]


def app_for(pool: FakePool):
    return create_app(CompletionService(pool, TOKENIZER))


def call(pool: FakePool, path: str, body: dict | bytes | None = None, method: str = "POST") -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app_for(pool), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            return await client.request(method, path, content=content)

    return asyncio.run(send())


def complete(pool: FakePool, **fields) -> httpx.Response:
    return call(pool, "/v1/completions", {"model": "demo", "prompt": "hi", "max_tokens": 40, **fields})


def chat(pool: FakePool, **fields) -> httpx.Response:
    return call(
        pool, "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}
    )


def chunks(response: httpx.Response) -> list[dict]:
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def with_client(pool: FakePool, use):
    """Run `use(client)` with OpenAI's own client."""

    async def run():
        http_client = httpx.AsyncClient(transport=httpx.ASGITransport(app_for(pool)))
        client = openai.AsyncOpenAI(api_key="x", base_url=URL + "/v1", http_client=http_client, max_retries=0)
        async with client:
            return await use(client)

    return asyncio.run(run())


class TestCompletions:
    def test_a_whole_response_has_text_usage_and_metrics(self):
        body = complete(FakePool("bonjour é")).json()
        assert body["object"] == "text_completion"
        assert body["choices"] == [{"index": 0, "text": "bonjour é", "logprobs": None, "finish_reason": "stop"}]
        assert body["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 11,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        assert body["metrics"]["speculative_decoding"]["acceptance_length"] == 2.5

    @pytest.mark.parametrize("tokens_per_output", [1, 2, 5, 100])
    def test_streamed_text_equals_whole_text(self, tokens_per_output):
        pool = FakePool("naïve 🦋 café", tokens_per_output)
        got = chunks(complete(pool, stream=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in got) == "naïve 🦋 café"
        assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None] * (len(got) - 1) + ["stop"]
        assert ["metrics" in chunk for chunk in got] == [False] * (len(got) - 1) + [True]
        assert "usage" not in got[0]

    def test_a_usage_chunk_comes_last_when_asked_for(self):
        *others, last = chunks(complete(FakePool(), stream=True, stream_options={"include_usage": True}))
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12
        assert last["metrics"]["speculative_decoding"]["num_drafts"] == 2

    def test_fields_reach_the_engine(self):
        pool = FakePool()
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "ignore_eos": True}
        complete(pool, **sampling, speculation={"enabled": False})
        params = pool.requests[0].params
        assert {name: getattr(params, name) for name in sampling} == sampling
        assert (params.speculation, params.max_tokens) == (False, 40)

    def test_defaults_are_openais(self):
        pool = FakePool()
        call(pool, "/v1/completions", {"model": "demo", "prompt": "hi", "top_k": -1, "temperature": None})
        params = pool.requests[0].params
        assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
        assert params.speculation
        assert not params.ignore_eos

    def test_the_seed_comes_back_and_counts_up_over_choices(self):
        pool = FakePool()
        assert complete(pool, n=3, seed=7).json()["seed"] == 7
        assert [request.params.seed for request in pool.requests] == [7, 8, 9]
        drawn = complete(pool).json()["seed"]
        assert pool.requests[-1].params.seed == drawn
        assert 0 <= drawn < 2**53
        assert complete(pool).json()["seed"] != drawn

    def test_seeds_at_the_edge_wrap(self):
        pool = FakePool()
        complete(pool, n=2, seed=2**63 - 1)
        assert [request.params.seed for request in pool.requests] == [2**63 - 1, -(2**63)]

    @pytest.mark.parametrize("stream", [False, True])
    def test_prompts_times_n_give_choices_in_order(self, stream):
        pool = FakePool(lambda request: TOKENIZER.decode(request.prompt_token_ids) + str(request.params.seed))
        response = complete(pool, prompt=["a", "bb"], n=2, seed=1, stream=stream)
        texts = [""] * 4
        for body in chunks(response) if stream else [response.json()]:
            for choice in body["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["a1", "a2", "bb1", "bb2"]
        if not stream:
            assert response.json()["usage"]["prompt_tokens"] == 3
            assert response.json()["metrics"]["speculative_decoding"]["num_drafts"] == 8

    @pytest.mark.parametrize("prompt", ["né", TOKENIZER.encode("né")])
    @pytest.mark.parametrize("stream", [False, True])
    def test_echo_puts_the_prompt_first(self, prompt, stream):
        response = complete(FakePool("e"), prompt=prompt, echo=True, stream=stream)
        bodies = chunks(response) if stream else [response.json()]
        assert "".join(body["choices"][0]["text"] for body in bodies) == "née"

    def test_token_prompts_reach_the_engine_unchanged(self):
        pool = FakePool()
        complete(pool, prompt=[[5, 6], [0, 256]])
        assert [request.prompt_token_ids for request in pool.requests] == [(5, 6), (0, 256)]


class TestStopStrings:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
    def test_text_ends_before_the_stop_string_wherever_it_is_cut(self, stream, tokens_per_output):
        pool = FakePool("one ENtwo END three", tokens_per_output)
        response = complete(pool, stop=["END", "never"], stream=stream)
        bodies = chunks(response) if stream else [response.json()]
        assert "".join(body["choices"][0]["text"] for body in bodies) == "one ENtwo "
        assert bodies[-1]["choices"][0]["finish_reason"] == "stop"
        assert not pool.running
        if not stream:
            assert bodies[0]["usage"]["completion_tokens"] == len("one ENtwo END")

    def test_the_engine_is_told_to_end(self):
        pool = FakePool("a. b. c. d.")
        body = complete(pool, stop=".").json()
        assert len(pool.aborted) == 1
        assert body["metrics"] == {"speculative_decoding": None}

    def test_metrics_stay_when_the_engine_was_done_anyway(self):
        pool = FakePool("a.", tokens_per_output=10)
        assert complete(pool, stop=".").json()["metrics"]["speculative_decoding"]["num_drafts"] == 2

    def test_other_choices_go_on(self):
        pool = FakePool(lambda request: "a. b" if request.params.seed == 1 else "longer text")
        choices = complete(pool, n=2, seed=1, stop=".").json()["choices"]
        assert [choice["text"] for choice in choices] == ["a", "longer text"]

    def test_text_held_back_at_the_end_is_sent(self):
        assert complete(FakePool("wait EN"), stop="END").json()["choices"][0]["text"] == "wait EN"


class TestChat:
    def test_a_whole_response_has_a_message(self):
        pool = FakePool()
        body = chat(pool).json()
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
        assert TOKENIZER.decode(pool.requests[0].prompt_token_ids) == "hi>"

    def test_without_a_limit_the_rest_of_the_context_is_used(self):
        pool = FakePool()
        chat(pool)
        assert pool.requests[0].params.max_tokens == 64 - 3

    def test_a_stream_begins_with_the_role_of_each_choice(self):
        got = chunks(chat(FakePool(), stream=True, n=2))
        for index in (0, 1):
            deltas = [choice["delta"] for chunk in got for choice in chunk["choices"] if choice["index"] == index]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert "".join(delta.get("content", "") for delta in deltas) == "hello world"
            assert deltas[-1] == {}
        assert ["metrics" in chunk for chunk in got] == [False] * (len(got) - 1) + [True]

    def test_a_model_without_template_says_so(self):
        tokenizer = byte_tokenizer()
        tokenizer._tokenizer.chat_template = None
        app = create_app(CompletionService(FakePool(), tokenizer))

        async def send():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client:
                body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
                return await client.post("/v1/chat/completions", json=body)

        response = asyncio.run(send())
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]


class TestOpenAIClient:
    def test_completion(self):
        got = with_client(
            FakePool(), lambda client: client.completions.create(model="demo", prompt="hi", max_tokens=40)
        )
        assert got.choices[0].text == "hello world"
        assert got.usage.completion_tokens == 12
        assert got.metrics["speculative_decoding"]["num_drafts"] == 2

    def test_chat_stream_with_usage(self):
        async def use(client):
            messages = [{"role": "user", "content": "hi"}]
            options = {"include_usage": True}
            stream = await client.chat.completions.create(
                model="demo", messages=messages, stream=True, stream_options=options
            )
            return [chunk async for chunk in stream]

        got = with_client(FakePool("ü\u2028x"), use)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in got if chunk.choices) == "ü\u2028x"
        assert got[-1].usage.prompt_tokens == 3

    def test_extensions_pass_through(self):
        pool = FakePool()
        extra = {"speculation": {"enabled": False}, "top_k": 3}
        with_client(pool, lambda client: client.completions.create(model="demo", prompt="hi", extra_body=extra))
        assert (pool.requests[0].params.speculation, pool.requests[0].params.top_k) == (False, 3)

    def test_errors_have_openais_classes(self):
        with pytest.raises(openai.BadRequestError) as caught:
            with_client(FakePool(), lambda client: client.completions.create(model="demo", prompt="hi", logprobs=1))
        assert (caught.value.param, caught.value.type) == ("logprobs", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            with_client(FakePool(), lambda client: client.completions.create(model="other", prompt="hi"))
        assert missing.value.code == "model_not_found"

    def test_an_error_in_mid_stream_is_raised(self):
        pool = FakePool()
        pool.fail_after = (2, EngineUnavailable("the engine died"))

        async def use(client):
            stream = await client.completions.create(model="demo", prompt="hi", max_tokens=40, stream=True)
            async for _ in stream:
                pass

        with pytest.raises(openai.APIError, match="the engine died"):
            with_client(pool, use)

    def test_models_are_listed_and_found(self):
        async def use(client):
            return (await client.models.list()).data[0].id, (await client.models.retrieve("demo")).id

        assert with_client(FakePool(), use) == ("demo", "demo")


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "param", "code"),
        [
            ({"prompt": "x" * 64}, "prompt", "context_length_exceeded"),
            ({"prompt": "x" * 60, "max_tokens": 5}, "max_tokens", "context_length_exceeded"),
            ({"prompt": [VOCAB_SIZE]}, "prompt", "invalid_value"),
            ({"prompt": [-1]}, "prompt", "invalid_value"),
            ({"prompt": [2**70]}, "prompt", "invalid_value"),
            ({"nonsense": 1}, "nonsense", "unknown_parameter"),
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

    def test_malformed_json_and_unknown_paths_have_openais_body(self):
        assert call(FakePool(), "/v1/completions", b"{").json()["error"]["code"] == "invalid_json"
        missing = call(FakePool(), "/v1/embeddings", {})
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


class Connection:
    """One HTTP request spoken straight in ASGI, so that the client can leave and events can be seen one by one."""

    def __init__(self, pool: FakePool, body: dict) -> None:
        self._app = app_for(pool)
        self._body = json.dumps(body).encode()
        self._body_sent = False
        self.left = asyncio.Event()
        self.sent: list[dict] = []

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [],
            "scheme": "http",
            "server": ("wingbeat", 80),
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        self.sent.append(message)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


class TestDisconnect:
    @pytest.mark.parametrize("how", ["disconnect", "cancel"])
    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize(("stream", "hang_after"), [(False, 2), (True, 0), (True, 2)])
    def test_a_client_that_leaves_frees_its_engines(self, how, n, stream, hang_after):
        async def scenario() -> FakePool:
            pool = FakePool()
            pool.hang_after = hang_after
            body = {"model": "demo", "prompt": "hi", "max_tokens": 40, "stream": stream, "n": n}
            connection = Connection(pool, body)
            task = asyncio.create_task(connection.run())
            await until(lambda: len(pool.running) == n)
            if stream and hang_after:
                await until(lambda: len(connection.sent) > hang_after)
            if how == "cancel":
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                connection.left.set()
                await asyncio.wait_for(task, 10)
            return pool

        pool = asyncio.run(scenario())
        assert not pool.running
        assert len(pool.aborted) == n

    def test_the_first_token_is_sent_before_the_second_exists(self):
        async def scenario() -> bytes:
            pool = FakePool(tokens_per_output=1)
            pool.hang_after = 1
            connection = Connection(pool, {"model": "demo", "prompt": "hi", "stream": True})
            task = asyncio.create_task(connection.run())
            await until(lambda: len(connection.sent) >= 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return connection.sent[1]["body"]

        assert json.loads(asyncio.run(scenario()).removeprefix(b"data: "))["choices"][0]["text"] == "h"
