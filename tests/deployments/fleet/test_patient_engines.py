"""Behaviour of routers towards engines that neither answer nor die."""

import asyncio

import pytest

from tests.deployments.pool_world import LocalEngines, collect, make_request, run, tokens
from tests.fakes import expected_tokens
from wingbeat.deployments.fleet import connection
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineUnavailable

LIMIT_S = 0.2


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CALL_S", "WORK_S", "DESCRIBE_S"):
        monkeypatch.setattr(connection, name, LIMIT_S)


async def for_ever(*arguments: object, **named: object) -> None:
    await asyncio.Event().wait()


def test_requests_that_an_engine_does_not_even_take_go_to_another_one():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        answers = source.exchange

        async def hangs(engine_id: str, **changes: object) -> None:
            await (for_ever() if engine_id == "a" else answers(engine_id, **changes))

        source.exchange = hangs
        tasks = [asyncio.create_task(collect(pool, make_request(f"r{index}"))) for index in range(4)]
        assert [tokens(await task) for task in tasks] == [expected_tokens((1, 2, 3), 7, 20)] * 4

    run(scenario, "a", "b")


@pytest.mark.parametrize("works", [False, True])
def test_a_call_that_is_not_answered_says_so(works):
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.operate = for_ever
        with pytest.raises(EngineUnavailable):
            await pool.every_engine.operate("reset_prefix_cache", works=works)
        with pytest.raises(TimeoutError, match=r"engine a has not answered reset_prefix_cache within"):
            await pool._source.call("a", "operate", works=works, operation="reset_prefix_cache", arguments=())

    run(scenario, "a")


def test_a_router_whose_question_for_the_model_is_lost_asks_again():
    async def scenario() -> None:
        source = LocalEngines("a")
        answers, asked = source.describe, []

        async def lost_at_first() -> object:
            asked.append(1)
            return await (for_ever() if len(asked) == 1 else answers())

        source.describe = lost_at_first
        pool = EnginePool(source, max_num_seqs=1, max_queued_requests=1)
        try:
            await asyncio.wait_for(pool.start(), 10)
            assert (len(asked), pool.info.model_name) == (2, "fake")
        finally:
            await pool.close()
            source.close()

    asyncio.run(scenario())
