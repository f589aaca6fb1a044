"""A scripted engine pool behind the HTTP application, and requests to it without a socket."""

import asyncio
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import httpx
from fastapi import FastAPI
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.deployments.scripted_tokens import Script, scripted_logprobs
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.completions import ChatReader, CompletionService
from wingbeat.deployments.api.guard import HttpLimits
from wingbeat.deployments.api.prompts import PromptReader
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.fleet.catalog import VARIANTS, Catalog, NameChanges, Names
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.every_engine import EveryEngine
from wingbeat.deployments.fleet.interface import EngineOverloaded, ModelInfo
from wingbeat.deployments.limits import MAX_ANSWER_BYTES
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.parts import merged
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import Request, RequestOutput, Variant
from wingbeat.runtime.tokenizer import Tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
URL = "http://wingbeat"
BODIES: dict[str, type[RequestBody]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
BODIES |= merged("bodies")
GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    """A tokenizer with a token per byte, after one special token."""
    entries = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = BackendTokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=chat_template)
    return Tokenizer(fast)


TOKENIZER = byte_tokenizer()
VOCAB_SIZE = 257


class FakeAdmission:
    """Places in a `FakePool`."""

    def __init__(self, pool: "FakePool", num_requests: int) -> None:
        self._pool = pool
        self._num_left = num_requests

    def release(self, num_requests: int | None = None) -> None:
        given = self._num_left if num_requests is None else min(num_requests, self._num_left)
        self._num_left -= given
        self._pool.num_admitted -= given


class FakeOneEngine:
    """A transport to an engine whose operations are methods; records the calls."""

    def __init__(self) -> None:
        self.told: list[NameChanges] = []
        self.engines = EveryEngine(self.call, lambda: ["engine"])

    async def call(self, engine_id: str, name: str, *, works: bool = False, **fields: Any) -> Any:
        if name == "tell":
            return self.told.append(fields["changes"])
        return getattr(self, fields["operation"])(*fields["arguments"])


class FakeCaches(FakeOneEngine):
    """Id of the engine whose prefix cache is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.num_resets = 0

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1


class FakePool:
    """Answers a request with a script's text, a few tokens at a time; records requests and aborts."""

    def __init__(
        self,
        answer: Callable[[Request], str] | str = "hello world",
        tokens_per_output: int = 2,
        engine_id: str = "",
    ) -> None:
        self.info = ModelInfo("demo", max_model_len=64, vocab_size=VOCAB_SIZE, drafter="fake")
        self.names = Names()
        self.cache_engine = FakeCaches()
        self.every_engine = self.cache_engine.engines
        self._answer = answer if callable(answer) else lambda _request: answer
        self._tokens_per_output = tokens_per_output
        self._engine_id = engine_id
        self.script = Script(TOKENIZER)
        self.requests: list[Request] = []
        self.sessions: list[str] = []
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.alive = True
        self.max_requests = 256
        self.max_num_seqs = 4
        self.num_admitted = 0
        self.hang_after: int | None = None
        """Outputs after which a request waits for ever."""
        self.weights_digest = ""
        """Digest of the weights that were pushed last and generate the next tokens; empty before a push."""
        self.fail_after: tuple[int, Exception] | None = None
        """Outputs after which a request fails, and how."""

    @property
    def variants(self) -> Catalog[Variant]:
        return self.names.catalogs[VARIANTS]

    def healthy(self) -> bool:
        return self.alive

    def admit(self, num_requests: int) -> FakeAdmission:
        if self.num_admitted + num_requests > self.max_requests:
            raise EngineOverloaded(retry_after_s=3)
        self.num_admitted += num_requests
        return FakeAdmission(self, num_requests)

    async def generate(self, request: Request, session_id: str = ""):
        self.requests.append(request)
        self.sessions.append(session_id)
        self.running.add(request.request_id)
        finished = False
        try:
            token_ids, finish = self.script.tokens(request, TOKENIZER.encode(self._answer(request)))
            logprobs = scripted_logprobs(request.params.logprobs, token_ids)
            of_prompt = scripted_logprobs(request.params.prompt_logprobs, request.prompt_token_ids[1:])
            for count, start in enumerate(range(0, len(token_ids), self._tokens_per_output)):
                await self._mishap(count)
                some = tuple(token_ids[start : start + self._tokens_per_output])
                finished = start + len(some) == len(token_ids)
                output = RequestOutput(
                    request.request_id,
                    some,
                    logprobs=logprobs[start : start + len(some)],
                    prompt_logprobs=of_prompt if count == 0 else (),
                    queue_s=0.0 if count else 0.25,
                    engine_id=self._engine_id,
                    weights=self.weights_digest,
                    report=b"" if request.params.report is None else scripted_report(request),
                )
                if finished:
                    metrics = SpeculationMetrics(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
                    output = output._replace(finish_reason=finish, metrics=metrics, num_cached_tokens=1)
                yield output
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


def scripted_report(request: Request) -> bytes:
    """Three numbers that tell prompts and reports apart."""
    first = float(request.params.report.is_of_all)
    return struct.pack("<3f", first, len(request.prompt_token_ids), sum(request.prompt_token_ids))


def app_for(
    pool: FakePool,
    access: Access | None = None,
    limits: HttpLimits | None = None,
    *,
    tokenizer: Tokenizer = TOKENIZER,
    parsers: ChatReader | None = None,
    monitor: Monitor | None = None,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
    marks: dict[str, str] | None = None,
    reader: PromptReader | None = None,
    of_parts: Mapping[str, Any] = MappingProxyType({}),
    more_routes: Sequence[Callable[[FastAPI], None]] = (),
):
    service = CompletionService(
        pool, tokenizer, parsers, prompt_reader=reader, max_answer_bytes=max_answer_bytes, of_parts=of_parts
    )
    return create_app(
        service,
        access,
        limits,
        monitor=monitor,
        marks=marks,
        more_routes=more_routes,
    )


class LaterModels(ServedModels):
    """Models that come after the application: to make one takes twice as long as a test."""

    def __init__(self, first: CompletionService) -> None:
        super().__init__(first)
        self._pools = [first.pool]

    @property
    def pools(self) -> list[EnginePool]:
        return self._pools

    def become(self, service: CompletionService) -> None:
        self._services, self._pools[:] = (service,), [service.pool]


@cache
def shared_app() -> tuple[FastAPI, LaterModels]:
    """The application without anything given, for one request after the other."""
    models = LaterModels(CompletionService(FakePool(), TOKENIZER, None))
    return create_app(models), models


def app_of_a_call(pool: FakePool, path: str, app: Mapping[str, Any]) -> FastAPI:
    """The shared application, or a new one for other settings and for routes that read the models on creation."""
    if app.keys() - {"tokenizer", "parsers"} or path not in GENERATES:
        return app_for(pool, **app)
    shared, models = shared_app()
    models.become(CompletionService(pool, app.get("tokenizer", TOKENIZER), app.get("parsers")))
    shared.state.off_loop = models.first.prompts.off_loop
    return shared


def call(
    pool: FakePool, path: str, body: dict | bytes | None = None, method: str = "POST", headers=None, **app
) -> httpx.Response:
    """Send a request, with a JSON body unless `headers` set another type; `app` goes to `app_for`."""
    headers = httpx.Headers(headers or {})
    if body is not None:
        headers.setdefault("Content-Type", "application/json")

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app_of_a_call(pool, path, app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            return await client.request(method, path, content=content, headers=headers)

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


class Connection:
    """An HTTP request sent straight through ASGI, so that the client can leave and events can be seen one by one."""

    def __init__(self, pool: FakePool, body: dict) -> None:
        self._app = app_for(pool)
        self._body = json.dumps(body).encode()
        self._body_sent = False
        self.extra_headers: list[tuple[bytes, bytes]] = []
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
            "headers": [(b"content-type", b"application/json"), *self.extra_headers],
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
