"""Several models behind one endpoint: a request's `model` chooses one."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.deployments.http_world import TOKENIZER, URL, FakePool
from tests.needs import needs
from tests.optional import kept
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.runtime.scheduling.request import Variant

MESSAGES = [{"role": "user", "content": "hi"}]


class World:
    """Two models, the second one of two names and with a variant."""

    def __init__(self, kind: type[FakePool] = FakePool, **more: Any) -> None:
        self.one, self.two = kind("from one"), kind("from two")
        self.two.info = replace(self.two.info, model_name="other", max_model_len=32)
        first = CompletionService(self.one, TOKENIZER, **more)
        second = CompletionService(self.two, TOKENIZER, aliases=("second",), beside=first, **more)
        self.two.variants.put("clerk", Variant("clerk", "good", "digest"))
        self.models = ServedModels(first, second)

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(create_app(self.models))
            async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
                return await client.request(method or ("GET" if body is None else "POST"), path, json=body)

        return asyncio.run(send())


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "text", "named"),
    [
        ("demo", "from one", "demo"),
        ("other", "from two", "other"),
        ("second", "from two", "other"),
        ("clerk", "from two", "clerk"),
    ],
)
def test_the_name_chooses_the_model(world: World, model: str, text: str, named: str):
    answer = world.ask("/v1/completions", {"model": model, "prompt": "x", "max_tokens": 20}).json()
    assert (answer["choices"][0]["text"], answer["model"]) == (text, named)
    answer = world.ask("/v1/chat/completions", {"model": model, "messages": MESSAGES}).json()
    assert answer["choices"][0]["message"]["content"] == text
    others = {"/v1/messages": {"messages": MESSAGES, "max_tokens": 20}, "/v1/responses": {"input": "hi"}}
    for path, body in kept(others).items():
        answer = world.ask(path, body | {"model": model}).json()
        parts = answer["content"] if path == "/v1/messages" else answer["output"][-1]["content"]
        assert parts[0]["text"] == text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/prefixes", {"name": "p", "prompt": "x"}),
    ],
)
def test_where_several_are_served_a_name_is_needed_and_must_be_one_of_theirs(world: World, path: str, body: dict):
    missing = world.ask(path, body)
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
    assert "demo, other, second" in missing.json()["error"]["message"]
    unknown = world.ask(path, body | {"model": "third"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert not world.one.requests
    assert not world.two.requests


def test_all_of_them_are_listed_each_with_its_limit(world: World):
    cards = {card["id"]: (card["parent"], card["max_model_len"]) for card in world.ask("/v1/models").json()["data"]}
    assert cards == {"demo": (None, 64), "other": (None, 32), "second": (None, 32), "clerk": ("other", 32)}
    assert world.ask("/v1/models/second").json()["max_model_len"] == 32
    assert world.ask("/v1/models/third").status_code == 404


@needs("tokens")
def test_a_tokenizer_is_asked_for_by_its_models_name(world: World):
    assert world.ask("/tokenizer_info?model=other").status_code == 200
    assert world.ask("/tokenizer_info").status_code == 400


def test_the_server_is_healthy_while_one_model_is_and_says_which(world: World):
    assert world.ask("/health").json()["models"] == {"demo": "ok", "other": "ok"}
    world.one.alive = False
    health = world.ask("/health")
    assert (health.status_code, health.json()["models"]) == (200, {"demo": "unavailable", "other": "ok"})
    assert world.ask("/ping").status_code == 200
    world.two.alive = False
    assert world.ask("/health").status_code == world.ask("/ping").status_code == 503
    world.ask("/reset_prefix_cache", method="POST")
    assert (world.one.cache_engine.num_resets, world.two.cache_engine.num_resets) == (1, 1)


def test_long_answers_of_all_models_share_one_room(world: World):
    first, second = world.models
    assert first.sizes is second.sizes
    assert first.turn is second.turn
