"""OpenAI's own client is served: its shapes, streams, extensions and error classes."""

import asyncio

import httpx
import openai
import pytest

from tests.deployments.http_world import URL, FakePool, app_for
from wingbeat.deployments.fleet.interface import EngineUnavailable


def with_client(pool: FakePool, use):
    """Run `use(client)` with OpenAI's own client."""

    async def run():
        http_client = httpx.AsyncClient(transport=httpx.ASGITransport(app_for(pool)))
        client = openai.AsyncOpenAI(api_key="x", base_url=URL + "/v1", http_client=http_client, max_retries=0)
        async with client:
            return await use(client)

    return asyncio.run(run())


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
            with_client(FakePool(), lambda client: client.completions.create(model="demo", prompt="hi", suffix="x"))
        assert (caught.value.param, caught.value.type) == ("suffix", "invalid_request_error")
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
