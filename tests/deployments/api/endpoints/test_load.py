"""`/load` reports the requests that a router has at its engines."""

import asyncio

import httpx

from tests.deployments.http_world import TOKENIZER, URL
from tests.deployments.pool_world import LocalEngines, make_request, run
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.fleet.engine_pool import EnginePool


async def load(pool: EnginePool) -> dict:
    app = create_app(CompletionService(pool, TOKENIZER))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client:
        return (await client.get("/load")).json()


def test_an_idle_server_has_no_load():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        idle = {"num_requests": 0, "outstanding_tokens": 0, "max_num_seqs": 16, "stalled": False}
        assert await load(pool) == {"server_load": 0, "engines": [{"engine": name, **idle} for name in "ab"]}

    run(scenario, "a", "b")


def test_running_requests_count_with_their_engine():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        admission = pool.admit(1)
        outputs = pool.generate(make_request(count=150))
        first = await anext(outputs)
        seen = await load(pool)
        assert seen["server_load"] == 1
        (engine,) = seen["engines"]
        assert engine["num_requests"] == 1
        assert 0 < engine["outstanding_tokens"] <= 3 + 150 - len(first.token_ids)
        await outputs.aclose()
        admission.release()
        assert (await load(pool))["server_load"] == 0

    run(scenario, "a")


def test_without_engines_the_list_is_empty():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce()
        await asyncio.sleep(0)
        while pool.loads():
            await asyncio.sleep(0.001)
        assert (await load(pool))["engines"] == []

    run(scenario, "a")
