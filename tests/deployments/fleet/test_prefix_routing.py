"""Requests go where their prefix is, as engines tell it, and routers count each other's requests."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.deployments.pool_world import LocalEngines, collect, make_request, run
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineOverloaded
from wingbeat.runtime.scheduling.request import Request, RequestOutput

PROMPT = tuple(range(17))


async def engine_of(pool: EnginePool, request: Request, session_id: str = "") -> str:
    """The engine that wrote the answer."""
    outputs: list[RequestOutput] = [output async for output in pool.generate(request, session_id)]
    return outputs[-1].engine_id


async def known(pool: EnginePool, name: str) -> None:
    """Return once the pool knows of prefixes that this engine has cached."""
    while not len(pool.connections[name].index):
        await asyncio.sleep(0.001)


def run_two(scenario: Callable[[EnginePool, EnginePool], Awaitable[None]], *names: str, **limits: int) -> None:
    """Run a scenario on two routers' pools of the same engines."""

    async def both(source: LocalEngines, first: EnginePool) -> None:
        second = EnginePool(source, **{"max_num_seqs": 16, "max_queued_requests": 16, **limits})
        await second.start()
        try:
            while len(second.loads()) < len(names):
                await asyncio.sleep(0.001)
            await scenario(first, second)
        finally:
            await second.close()

    run(both, *names, **limits)


def test_the_next_turn_of_a_conversation_goes_where_the_one_before_was_computed():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        busy = asyncio.create_task(collect(pool, make_request("busy", (40,), 12)))
        await asyncio.sleep(0)
        first = await engine_of(pool, make_request("first", PROMPT, 3))
        await busy
        await known(pool, first)
        assert first == "b"
        assert await engine_of(pool, make_request("next", (*PROMPT, 30, 31), 3)) == "b"
        assert await engine_of(pool, make_request("other", (41, *PROMPT), 3)) == "a"

    run(scenario, "a", "b")


def test_a_cache_that_was_reset_draws_nobody():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce("b")
        await asyncio.sleep(0)
        assert await engine_of(pool, make_request("first", PROMPT, 3)) == "b"
        await known(pool, "b")
        source.announce("a", "b")
        await pool.every_engine.operate("reset_prefix_cache")
        while len(pool.connections["b"].index) or len(pool.loads()) < 2:
            await asyncio.sleep(0.001)
        assert await engine_of(pool, make_request("next", PROMPT, 3)) == "a"

    run(scenario, "a", "b")


def test_a_router_that_comes_later_is_told_what_is_cached():
    async def scenario(first: EnginePool, second: EnginePool) -> None:
        assert await engine_of(first, make_request("first", PROMPT, 3)) == "a"
        await known(first, "a")
        connection = second.connections.pop("a")
        await connection.close()
        second._connect("a")
        await known(second, "a")
        assert second.connections["a"].index.snapshot() == first.connections["a"].index.snapshot()

    run_two(scenario, "a")


def test_a_session_goes_to_one_engine_where_all_are_idle():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        for session in "pqrs":
            prompts = [(number,) for number in range(4)]
            used = [await engine_of(pool, make_request("r", prompt, 2), session) for prompt in prompts]
            assert len(set(used)) == 1

    run(scenario, "a", "b", "c")


def test_routers_together_admit_what_there_is_room_for_once():
    async def scenario(first: EnginePool, second: EnginePool) -> None:
        places = first.admit(3)
        tasks = [asyncio.create_task(collect(first, make_request(str(i), (i,), 190))) for i in range(3)]
        while second.connections["a"].other_requests < 3:
            await asyncio.sleep(0.001)
        second.admit(1)
        with pytest.raises(EngineOverloaded):
            second.admit(1)
        for task in tasks:
            task.cancel()
        places.release()
        while second.connections["a"].other_requests:
            await asyncio.sleep(0.001)
        second.admit(3)

    run_two(scenario, "a", max_num_seqs=2, max_queued_requests=2)


def test_a_router_sends_its_requests_past_the_engine_that_others_keep_busy():
    async def scenario(first: EnginePool, second: EnginePool) -> None:
        tasks = [asyncio.create_task(collect(first, make_request(str(i), (i,), 190))) for i in range(2)]
        await asyncio.sleep(0)
        # Both engines have one; the third goes to the first of them.
        tasks.append(asyncio.create_task(collect(first, make_request("third", (3,), 190))))
        while second.connections["a"].other_requests < 2:
            await asyncio.sleep(0.001)
        assert await engine_of(second, make_request("mine", (9,), 3)) == "b"
        for task in tasks:
            task.cancel()

    run_two(scenario, "a", "b")
