"""Engines that come and go: requests wait for them, leave them and go on elsewhere, and no text changes."""

import asyncio
from functools import partial

import pytest

from tests.deployments.pool_world import LocalEngines, collect, make_request, run, tokens, until
from tests.fakes import FakeEngine, expected_tokens
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineOverloaded, EngineUnavailable

NARROW = partial(FakeEngine, max_num_seqs=2)


def start(pool: EnginePool, number: int, count: int = 100) -> asyncio.Task:
    return asyncio.create_task(collect(pool, make_request(str(number), (number,), count, seed=number)))


async def asleep(source: LocalEngines, pool: EnginePool) -> None:
    """Take every replica out."""
    source.announce()
    await until(lambda: not pool.loads())


def test_without_an_engine_a_request_waits_and_asks_for_one_until_it_is_there():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        await asleep(source, pool)
        asked = source.num_described
        places = pool.admit(2)
        tasks = [start(pool, number) for number in range(2)]
        await until(lambda: source.num_described > asked)
        await asyncio.sleep(0.01)
        assert not source.engines["a"].num_started
        source.announce("a")
        for number, outputs in enumerate(await asyncio.gather(*tasks)):
            assert tokens(outputs) == expected_tokens((number,), number, 100)
        places.release()

    run(scenario, "a", engine_wait_s=20.0)


def test_no_more_requests_wait_for_an_engine_than_the_queue_has_places():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        await asleep(source, pool)
        pool.admit(3)
        with pytest.raises(EngineOverloaded):
            pool.admit(1)

    run(scenario, "a", engine_wait_s=20.0, max_queued_requests=3)


def test_a_request_that_no_engine_came_for_in_time_fails_as_unavailable():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        await asleep(source, pool)
        with pytest.raises(EngineUnavailable):
            await start(pool, 1)

    run(scenario, "a", engine_wait_s=0.05)


def test_a_server_that_is_stopped_ends_the_wait():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        await asleep(source, pool)
        task = start(pool, 1)
        await until(lambda: pool._wait.num_waiting == 1)
        await pool.drain(0.0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await task

    run(scenario, "a", engine_wait_s=20.0)


def test_a_stream_whose_only_engine_dies_goes_on_at_the_next_one():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce("a")
        await until(lambda: len(pool.loads()) == 1)
        task = start(pool, 1)
        await until(lambda: source.serves("a", (1,)))
        source.kill("a")
        await until(lambda: pool._wait.num_waiting == 1)
        source.announce("b")
        assert tokens(await task) == expected_tokens((1,), 1, 100)

    run(scenario, "a", "b", engine_wait_s=20.0)


@pytest.mark.parametrize("may_sleep", [False, True])
def test_no_replica_at_all_is_healthy_only_where_there_may_be_none(may_sleep):
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        await asleep(source, pool)
        assert pool.healthy() == may_sleep

    run(scenario, "a", engine_wait_s=20.0, may_sleep=may_sleep)


def test_what_waits_at_an_engine_that_is_taken_out_goes_to_the_others_at_once_and_what_runs_ends_there():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce("a")
        await asyncio.sleep(0)
        for engine in source.engines.values():
            engine.round_s = 0.01
        tasks = [start(pool, number) for number in range(4)]
        await until(lambda: source.loops["a"].num_requests == 4 and source.engines["a"].num_started == 4)
        await until(lambda: sum(not s.begun for s in pool.connections["a"]._streams.values()) == 2)
        source.announce("a", "b")
        await until(lambda: len(pool.loads()) == 2)
        source.announce("b")
        await until(lambda: source.engines["b"].num_started == 2)
        assert source.engines["a"].prompts() == {(0,), (1,)}
        assert source.engines["b"].prompts() == {(2,), (3,)}
        for number, outputs in enumerate(await asyncio.gather(*tasks)):
            assert tokens(outputs) == expected_tokens((number,), number, 100)
            assert outputs[-1].engine_id == "aabb"[number]

    run(scenario, "a", "b", engine=NARROW, max_num_seqs=2)


def test_what_still_runs_when_the_grace_period_is_over_goes_on_elsewhere_from_where_it_was():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.engines["a"].round_s = 0.05
        task = start(pool, 1, 190)
        await until(lambda: source.serves("a", (1,)))
        await asyncio.sleep(0.2)
        source.announce("b")
        outputs = await task
        assert tokens(outputs) == expected_tokens((1,), 1, 190)
        assert [output.engine_id for output in (outputs[0], outputs[-1])] == ["a", "b"]
        ((written,),) = [{len(r.output_token_ids) for r in source.engines["b"].taken}]
        assert written > 0
        await until(lambda: not source.engines["a"].has_unfinished_requests())

    run(scenario, "a", "b", grace_s=0.1)


def test_the_last_engine_keeps_what_it_has():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        tasks = [start(pool, number, 60) for number in range(4)]
        await until(lambda: source.engines["a"].num_started == 4)
        source.announce()
        for number, outputs in enumerate(await asyncio.gather(*tasks)):
            assert tokens(outputs) == expected_tokens((number,), number, 60)

    run(scenario, "a", engine=NARROW, max_num_seqs=2, grace_s=0.02)


def test_what_waits_at_the_last_engine_when_it_is_taken_out_goes_to_the_next_one():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.engines["a"].round_s = 0.02
        source.announce("a")
        await until(lambda: len(pool.loads()) == 1)
        tasks = [start(pool, number, 60) for number in range(4)]
        await until(lambda: source.engines["a"].num_started == 4)
        source.announce()
        await until(lambda: not pool.loads())
        source.announce("b")
        for number, outputs in enumerate(await asyncio.gather(*tasks)):
            assert tokens(outputs) == expected_tokens((number,), number, 60)
            assert outputs[-1].engine_id == "aabb"[number]

    run(scenario, "a", "b", engine=NARROW, max_num_seqs=2)


def test_a_new_engine_takes_what_waits_for_others():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce("a")
        await asyncio.sleep(0)
        source.engines["a"].round_s = 0.02
        tasks = [start(pool, number, 60) for number in range(6)]
        await until(lambda: source.engines["a"].num_started == 6)
        source.announce("a", "b")
        results = await asyncio.gather(*tasks)
        for number, outputs in enumerate(results):
            assert tokens(outputs) == expected_tokens((number,), number, 60)
        assert [outputs[-1].engine_id for outputs in results[:2]] == ["a", "a"]
        assert [outputs[-1].engine_id for outputs in results[2:4]] == ["b", "b"]

    run(scenario, "a", "b", engine=NARROW, max_num_seqs=2)
