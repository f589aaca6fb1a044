"""An engine that is alive but stuck: the cause, the effect on others, and the log."""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.deployments.pool_world import collect, make_request, tokens
from tests.deployments.replica.child_engines import HANGS, HANGS_IN_C
from tests.deployments.replica_world import pool_of, started
from tests.fakes import expected_tokens
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EnginesEnded
from wingbeat.deployments.replica import engine_life, verifier_replica
from wingbeat.deployments.replica.engine_client import EngineFailed

ENGINES = "tests.deployments.replica.child_engines"
PATIENCE_S = 60.0
STUCK_S = 1.0


def bystander(pool: EnginePool, index: int, count: int = 150) -> asyncio.Task:
    return asyncio.create_task(collect(pool, make_request(f"bystander {index}", (1, 2, index), count)))


def texts(num: int, count: int = 150) -> list[tuple[int, ...]]:
    return [expected_tokens((1, 2, index), 7, count) for index in range(num)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def engine_pid(pool: EnginePool, name: str) -> int:
    return pool.replicas[name]._engines.life._process.pid


@pytest.mark.slow
@pytest.mark.parametrize(
    "token",
    [pytest.param(HANGS, id="in Python", marks=pytest.mark.slow), pytest.param(HANGS_IN_C, id="in C")],
)
def test_what_makes_an_engine_hang_fails_after_two_engines_and_its_neighbours_texts_are_as_ever(
    token: int, capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
):
    async def scenario() -> None:
        async with pool_of("a", engine_factory=f"{ENGINES}:build_hanging", engine_stuck_after_s=STUCK_S) as pool:
            others = [bystander(pool, index) for index in range(4)]
            bad = asyncio.create_task(collect(pool, make_request("bad", (token, 2, 3), 100)))
            await until(lambda: not pool.healthy())
            with pytest.raises(EnginesEnded, match="2 engines in a row") as failed:
                await bad
            assert "stuck" in str(failed.value)
            assert "stuck" not in failed.value.for_caller
            assert [tokens(await other) for other in others] == texts(4)
            await until(pool.healthy)
            assert (await pool.replicas["a"].stats())["num_engine_restarts"] == 2

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    stacks = capfd.readouterr().err
    assert re.search(r"child_engines\.py\", line \d+ in _hang", stacks)
    assert "in a round of" in caplog.text


@pytest.mark.slow
def test_requests_go_to_another_engine_while_one_makes_no_progress(capfd: pytest.CaptureFixture):
    async def scenario() -> None:
        async with pool_of("a", "b", engine_factory=f"{ENGINES}:build_plain", engine_stuck_after_s=6.0) as pool:
            pid = engine_pid(pool, "a")
            os.kill(pid, signal.SIGSTOP)
            held = [bystander(pool, index) for index in range(2)]
            await until(lambda: any(load.stalled for load in pool.loads()))
            assert pool.healthy()
            assert [tokens(await other) for other in [bystander(pool, index) for index in range(4)]] == texts(4)
            os.kill(pid, signal.SIGCONT)  # soon enough: it goes on
            assert [tokens(await one) for one in held] == texts(2)
            await until(lambda: not any(load.stalled for load in pool.loads()))
            assert engine_pid(pool, "a") == pid

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False])
def test_an_engine_that_is_stopped_for_good_is_replaced_also_where_it_had_nothing_to_do(
    busy: bool, capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
):
    async def scenario() -> None:
        async with pool_of("a", engine_factory=f"{ENGINES}:build_plain", engine_stuck_after_s=STUCK_S) as pool:
            first = [bystander(pool, index) for index in range(3 * busy)]
            if busy:
                await until(lambda: pool.loads()[0].outstanding_tokens < 3 * 150)
            os.kill(engine_pid(pool, "a"), signal.SIGSTOP)
            held = [bystander(pool, index) for index in range(2)]
            assert [tokens(await one) for one in (*first, *held)] == [*texts(3 * busy), *texts(2)]

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert "stopped by a signal" in caplog.text


class Ranks:
    """A stand-in for the ranks of an engine's life; the first life's ranks are ended."""

    group, pids = None, ()

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended

    async def lost(self) -> str:
        await self._ended.wait()
        self._ended.clear()
        return "rank 1 of the verifier has ended"

    def kill(self) -> None:
        pass


def test_an_engine_that_waits_for_a_rank_that_has_ended_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As in a captured round, whose collectives have no time limit: the engine handles no message."""
    hook = verifier_replica.first_result
    monkeypatch.setattr(engine_life, "STOP_S", 0.1)

    async def scenario() -> None:
        ended = asyncio.Event()

        def launch(name: str, *args: Any) -> Any:
            return partial(Ranks, ended) if name == "launch_ranks" else hook(name, *args)

        monkeypatch.setattr(verifier_replica, "first_result", launch)
        async with pool_of("a", engine_factory=f"{ENGINES}:build_plain", engine_stuck_after_s=600.0) as pool:
            others = [bystander(pool, index) for index in range(3)]
            await until(lambda: pool.loads()[0].outstanding_tokens < 3 * 150)
            os.kill(engine_pid(pool, "a"), signal.SIGSTOP)
            ended.set()
            assert [tokens(await other) for other in others] == texts(3)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert "rank 1 of the verifier has ended" in caplog.messages


@pytest.mark.slow
def test_an_idle_engine_is_never_stuck():
    async def scenario() -> None:
        async with pool_of("a", engine_factory=f"{ENGINES}:build_plain", engine_stuck_after_s=0.3) as pool:
            pid = engine_pid(pool, "a")
            await asyncio.sleep(2.0)
            assert (engine_pid(pool, "a"), pool.healthy()) == (pid, True)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


@pytest.mark.slow
def test_an_engine_whose_loading_hangs_is_ended_and_its_stack_is_in_the_log(capfd: pytest.CaptureFixture):
    async def scenario() -> None:
        config = AppConfig(drafter="none", engine_factory=f"{ENGINES}:build_slowly", engine_start_timeout_s=4.0)
        with pytest.raises(EngineFailed, match="has not started within 4 s"):
            await started("a", config)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert re.search(r"child_engines\.py\", line \d+ in build_slowly", capfd.readouterr().err)
