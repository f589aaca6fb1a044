"""An update replaces the engines one at a time, as a router that has requests running sees it."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.deployments.pool_world import LocalEngines, collect, make_request, run, tokens, until
from tests.fakes import expected_tokens
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.replica.verifier_replica import OtherModel


def start(pool: EnginePool, number: int) -> asyncio.Task:
    return asyncio.create_task(collect(pool, make_request(str(number), (number,), 190, seed=number)))


@pytest.mark.slow
def test_requests_that_run_across_a_whole_update_write_what_they_would_have_written():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce("a", "b")
        await until(lambda: len(pool.loads()) == 2)
        for engine in source.engines.values():
            engine.round_s = 0.01
        tasks = [start(pool, number) for number in range(4)]
        await until(lambda: source.engines["a"].num_started > 0 < source.engines["b"].num_started)
        for live in (("b",), ("b", "c"), ("c",), ("c", "d")):
            source.announce(*live)
            await until(lambda live=live: len(pool.loads()) == len(live) and not pool._retired)
        for number, outputs in enumerate(await asyncio.gather(*tasks)):
            assert tokens(outputs) == expected_tokens((number,), number, 190)
            assert outputs[0].engine_id in "ab"
            assert outputs[-1].engine_id in "cd"

    run(scenario, "a", "b", "c", "d", grace_s=0.05)


def test_requests_of_the_old_settings_never_reach_an_engine_that_would_write_another_text(
    monkeypatch: pytest.MonkeyPatch,
):
    real = LocalEngines.stream
    tried: list[str] = []

    async def stream(self: LocalEngines, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        if engine_id == "new" and self.killed:
            tried.append(engine_id)
            raise OtherModel("the new one is served here, not the old one")
        async for message in real(self, engine_id, client_id):
            yield message

    monkeypatch.setattr(LocalEngines, "stream", stream)

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce("old")
        await asyncio.sleep(0)
        source.engines["old"].round_s = 0.02
        task = start(pool, 1)
        await until(lambda: source.serves("old", (1,)))
        source.kill("old")
        source.announce("new")
        with pytest.raises(EngineUnavailable):
            await task
        assert tried
        assert not source.engines["new"].taken

    run(scenario, "old", "new", engine_wait_s=0.3)
