"""A replica whose weights are replaced.

Running requests end with the old weights, and later ones wait for the new weights. After a failure the old weights are
still served.
"""

import asyncio
import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.deployments.pool_world import collect, make_request, tokens
from tests.deployments.replica_world import Replica, pool_of, started
from tests.runtime.pushed_folder import BAD, edit, pushed_folder
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.refused_models.cluster_memory import ClusterMemory
from wingbeat.deployments.weights import replica_weights
from wingbeat.deployments.weights.push import FleetWeights, Refusal, Weights, WeightsConflict, WeightsRefused
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.scheduling.request import RequestOutput
from wingbeat.runtime.successor import Inspected
from wingbeat.runtime.verifier.checkpoints.digests import weights_digest

FACTORY = "tests.deployments.replica.child_engines:build_of_weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's verifier, by other weights."""
    return pushed_folder(tmp_path_factory.mktemp("pushed") / "step-1")


def written(weights: str, count: int) -> tuple[int, ...]:
    """Tokens that the engine of `build_of_weights` generates."""
    from tests.deployments.replica.child_engines import token_of_weights

    return (token_of_weights(weights),) * count


@asynccontextmanager
async def fleet(*names: str) -> AsyncIterator[EnginePool]:
    async with pool_of(*names, engine_factory=FACTORY) as pool:
        pool.weights = FleetWeights.of(pool)
        yield pool


async def inspected(replica: Replica, name: str, folder: Path) -> tuple[Weights, str | None]:
    return await replica.ask(engine_id=name, operation="inspect_weights", arguments={"folder": str(folder)})


async def taken(replica: Replica, name: str, weights: Weights) -> Refusal | None:
    arguments = {"weights": weights._replace(version=1), "drain_s": 5.0}
    return await replica.ask(engine_id=name, operation="take_weights", arguments=arguments)


def keep_by(monkeypatch: pytest.MonkeyPatch, get: Callable[..., bytes | None], put: Callable[..., None]) -> None:
    """Replace the cluster's key-value store, in which replicas keep pushed weights, by these functions."""
    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_get", get)
    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_put", put)
    monkeypatch.setattr(
        "wingbeat.deployments.weights.replica_weights.ClusterMemory", lambda key: ClusterMemory("build")
    )


async def until_written_by(weights: str, answers: list[tuple[int, ...]]) -> None:
    while not answers or answers[-1] != written(weights, 3):
        await asyncio.sleep(0.01)


async def restarted(pool: EnginePool) -> None:
    while not pool.loads():
        await asyncio.sleep(0.01)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are looked at without a process, which takes seconds."""
    monkeypatch.setattr(replica_weights, "inspected", lambda folder, served: Inspected(weights_digest(folder)))


@pytest.mark.few(1)
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("names", ["a", "ab"])
def test_what_runs_ends_by_its_weights_and_what_comes_waits_for_the_others(folder: Path, names: str):
    async def scenario() -> None:
        async with fleet(*names) as pool:
            long = [asyncio.create_task(collect(pool, make_request(f"r{i}", count=60))) for i in range(8)]
            await asyncio.sleep(0.2)
            later: list[tuple[int, ...]] = []

            async def keep_asking() -> None:
                while True:
                    later.append(tokens(await collect(pool, make_request("later", count=3))))

            asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
            digest = weights_digest(folder)
            await until_written_by("", later)
            await pool.weights.push(str(folder), 30.0)
            # Waiting requests are answered after the push, not before it ends.
            await until_written_by(digest, later)
            for task in asking:
                task.cancel()
            assert [tokens(await task) for task in long] == [written("", 60)] * 8
            # Whichever engine: of one weights from the first token to the last.
            assert set(later) == {written("", 3), written(digest, 3)}
            assert later[-1] == written(digest, 3)
            assert {output.weights for output in await collect(pool, make_request("last", count=3))} == {digest}
            await restarted(pool)
            assert {c.weights for c in pool.connections.values() if c.open} <= {digest}
            cards = await pool.weights.described()
            assert {(card["weights"], card["folder"], card["state"]) for card in cards.values()} == {
                (digest, str(folder), "serves")
            }
            # Pushed again, it is there already.
            pids = {name: (await one.stats())["engine_pid"] for name, one in pool.replicas.items()}
            await pool.weights.push(str(folder), 0.0)
            assert pids == {name: (await one.stats())["engine_pid"] for name, one in pool.replicas.items()}

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_requests_that_do_not_end_in_time_end_by_the_weights_that_they_have_and_nothing_is_replaced(folder: Path):
    async def scenario() -> None:
        async with fleet("a") as pool:
            long = asyncio.create_task(collect(pool, make_request("long", count=150)))
            await asyncio.sleep(0.3)
            pushing = asyncio.create_task(pool.weights.push(str(folder), 0.1))
            while pool.loads():  # until it drains
                await asyncio.sleep(0.005)
            held = asyncio.create_task(collect(pool, make_request("held", count=3)))
            with pytest.raises(WeightsConflict, match=r"1 requests have not ended within 0.1 s"):
                await pushing
            assert tokens(await held) == written("", 3)
            assert tokens(await long) == written("", 150)
            assert (await pool.weights.described())["a"]["weights"] is None

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_an_engine_that_dies_afterwards_comes_back_with_what_was_pushed_and_so_does_a_replica(folder, monkeypatch):
    kept: dict[str, bytes] = {}

    def put(key: str, value: str, namespace: bytes) -> None:
        kept[key] = value.encode()

    keep_by(monkeypatch, lambda key, namespace: kept.get(key), put)

    async def scenario() -> None:
        digest = weights_digest(folder)
        async with fleet("a") as pool:
            await pool.weights.push(str(folder), 5.0)
            await restarted(pool)
            os.kill((await pool.replicas["a"].stats())["engine_pid"], signal.SIGKILL)
            while pool.loads():
                await asyncio.sleep(0.005)
            assert tokens(await collect(pool, make_request("r", count=5))) == written(digest, 5)
            assert (await pool.replicas["a"].stats())["num_engine_restarts"] == 1
        again: Replica = await started("c", AppConfig(drafter="none", engine_factory=FACTORY))
        try:
            assert (await again.stats())["weights"] == digest
        finally:
            await again.end()

    asyncio.run(asyncio.wait_for(scenario(), 120))


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("answers", ["late", "breaks"])
def test_weights_that_cannot_be_kept_are_said_to_be_and_pushed_again(folder: Path, monkeypatch, answers: str):
    kept: list[Weights] = []
    spoilt = [True]

    def put(key: str, value: str, namespace: bytes) -> None:
        if spoilt[0]:
            time.sleep(1.0 if answers == "late" else 0.0)
            raise RuntimeError("the cluster is gone")
        kept.append(Weights(*json.loads(value)))

    keep_by(monkeypatch, lambda key, namespace: None, put)
    monkeypatch.setattr("wingbeat.deployments.refused_models.cluster_memory.KEEP_S", 0.3)

    async def scenario() -> None:
        async with fleet("a") as pool:
            with pytest.raises(WeightsConflict, match=r"not stored for other replicas: .*(not answered|is gone)"):
                await pool.weights.push(str(folder), 5.0)
            await restarted(pool)
            pid = (await pool.replicas["a"].stats())["engine_pid"]
            spoilt[0] = False
            await pool.weights.push(str(folder), 5.0)
            assert (await pool.replicas["a"].stats())["engine_pid"] == pid, "it has them already"
            assert [one.digest for one in kept] == [weights_digest(folder)]

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def begun_at(pool: EnginePool, engine_id: str) -> tuple[AsyncGenerator[RequestOutput, None], list[int]]:
    """A request that has begun at an engine, and its tokens so far."""
    for number in range(100):
        running = pool.generate(make_request(f"r{number}", count=100), f"session {number}")
        if (output := await anext(running)).engine_id == engine_id:
            return running, list(output.token_ids)
        await running.aclose()
    raise AssertionError(f"no request comes to {engine_id}")


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_text_goes_on_by_its_weights_alone_and_fails_where_no_engine_has_them(folder: Path):
    async def scenario() -> None:
        async with fleet("a", "b") as pool:
            pool.limit(16, 1.0)
            a, b = pool.replicas["a"], pool.replicas["b"]
            (weights, problem) = await inspected(a, "a", folder)
            assert problem is None
            assert await taken(a, "a", weights) is None
            while len(pool.loads()) < 2:
                await asyncio.sleep(0.01)
            old, got = await begun_at(pool, "b")
            # Its engine comes back with the weights that it had, and goes on.
            os.kill((await b.stats())["engine_pid"], signal.SIGKILL)
            pool.limit(16, 60.0)
            async for output in old:
                got += output.token_ids
            assert tuple(got) == written("", 100)
            # Nobody has them any more.
            pool.limit(16, 0.5)
            old, got = await begun_at(pool, "b")
            pool._update(frozenset("a"))
            (gone,) = pool._retired
            gone.give_up_all("b is gone")
            with pytest.raises(EngineUnavailable):
                got += [token async for output in old for token in output.token_ids]
            assert set(got) == set(written("", 1))

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_is_held(folder: Path, tmp_path: Path):
    async def scenario() -> None:
        async with fleet("a") as pool:
            pid = (await pool.replicas["a"].stats())["engine_pid"]
            spoil, missing = BAD["a tensor less"]
            spoil(bad := shutil.copytree(folder, tmp_path / "bad"))
            circle = tmp_path / "circle"
            circle.symlink_to(circle)
            for named, reason in (
                (bad, missing),
                (demo_pair().verifier, "is the folder that is served"),
                ("step-1", "must be an absolute path"),
                ("/a\0b", "cannot be read"),
                (circle, "cannot be read|does not exist"),
            ):
                with pytest.raises(WeightsRefused, match=reason):
                    await pool.weights.push(str(named), 5.0)
            assert (await pool.replicas["a"].stats())["engine_pid"] == pid
            assert tokens(await collect(pool, make_request("r", count=3))) == written("", 3)

    asyncio.run(asyncio.wait_for(scenario(), 200))


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_where_no_engine_starts_with_them_those_before_are_served_again(folder: Path, tmp_path: Path, monkeypatch):
    unfit = shutil.copytree(folder, tmp_path / "unfit")  # as `build_of_weights` has it

    async def scenario() -> None:
        async with fleet("a") as pool:
            with pytest.raises(
                WeightsRefused, match=r"no engine starts with it: .*unfit.*; the former checkpoint is served again"
            ):
                await pool.weights.push(str(unfit), 5.0)
            assert tokens(await collect(pool, make_request("r", count=3))) == written("", 3)
            # Files that change between the look at them and the start are not what was pushed.
            good = shutil.copytree(folder, tmp_path / "good")
            (weights, _) = await inspected(pool.replicas["a"], "a", good)
            edit(good, "config.json", _name_or_path="changed")
            refusal = await taken(pool.replicas["a"], "a", weights)
            assert "has changed since its weights were pushed" in refusal.reason
            await restarted(pool)
            assert tokens(await collect(pool, make_request("r", count=3))) == written("", 3)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_settings_that_other_weights_do_not_go_with_are_named():
    assert "engine_dir" in replica_weights.refused_by(AppConfig().model_copy(update={"engine_dir": Path()}))
    assert replica_weights.refused_by(AppConfig()) is None


def test_names_and_drafter_stay_with_other_weights(folder: Path):
    config = AppConfig()
    others = config.with_weights(folder)
    assert (others.model_names(), others.model_dir(), others.named_dir()) == (
        config.model_names(),
        folder,
        demo_pair().verifier,
    )
    assert others.choice().source == config.choice().source
    assert pickle.loads(pickle.dumps(others)).named_dir() == demo_pair().verifier
    assert others.with_weights(demo_pair().verifier).named_dir() == demo_pair().verifier
