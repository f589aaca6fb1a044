"""Every router and every replica has the same list of adapters, whoever changed it and whoever comes later."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.deployments.pool_world import LocalEngines, run
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.live_settings.live_options import LiveOptions
from wingbeat.deployments.lora import live
from wingbeat.deployments.lora.fleet import FleetAdapters
from wingbeat.deployments.lora.live import NamedAdapters


async def routers(source: LocalEngines, count: int) -> list[EnginePool]:
    pools = [EnginePool(source, max_num_seqs=16, max_queued_requests=16) for _ in range(count)]
    for pool in pools:
        await pool.start()
        await until(lambda pool=pool: bool(pool.loads()))
    return pools


def named_in(pool: EnginePool) -> NamedAdapters:
    """Adapters of a router whose only model is `pool`."""
    return NamedAdapters([SimpleNamespace(pool=pool, config=AppConfig(lora_update_dir="/"))])


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def knows(pool: EnginePool, *names: str) -> bool:
    return [adapter.name for adapter in pool.variants.things] == list(names)


def test_a_change_reaches_every_router_and_those_that_come_later():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        (other,) = await routers(source, 1)
        await FleetAdapters(pool).load("sql", "/adapters/sql")
        await until(lambda: knows(other, "sql"))
        (later,) = await routers(source, 1)
        await until(lambda: knows(later, "sql"))
        await FleetAdapters(later).delete("sql")
        await until(lambda: knows(pool) and knows(other))
        for one in (other, later):
            await one.close()

    run(scenario, "a", "b")


def test_a_replica_that_comes_is_told_by_the_routers():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce("a")
        await until(lambda: len(pool.loads()) == 1)
        await FleetAdapters(pool).load("sql", "/adapters/sql")
        assert source.names["b"].catalogs["variants"].find("sql") is None
        source.announce("a", "b")
        await until(lambda: source.names["b"].catalogs["variants"].find("sql") is not None)

    run(scenario, "a", "b")


def test_without_an_engine_nothing_is_loaded():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce()
        await until(lambda: not pool.loads())
        try:
            await FleetAdapters(pool).load("sql", "/adapters/sql")
        except EngineUnavailable:
            assert knows(pool)
        else:
            raise AssertionError("an adapter was loaded into no engine")

    run(scenario, "a")


def test_named_adapters_come_and_go_and_what_is_named_by_two_routers_is_loaded_once_more():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        (other,) = await routers(source, 1)
        ones, others = named_in(pool), named_in(other)
        for named in (ones, others):
            await named.apply(LiveOptions(lora_modules={"sql": "/adapters/sql", "code": "/adapters/code"}))
        await until(lambda: knows(pool, "sql", "code") and knows(other, "sql", "code"))
        await FleetAdapters(pool).load("by_http", "/adapters/http")
        for named in (ones, others):
            await named.apply(LiveOptions(lora_modules={"code": "/adapters/code"}))
        await until(lambda: knows(pool, "code", "by_http") and knows(other, "code", "by_http"))
        await ones.apply(LiveOptions(lora_modules={}))
        await until(lambda: knows(other, "by_http"))
        await other.close()

    run(scenario, "a")


def test_a_named_adapter_waits_for_an_engine(monkeypatch):
    monkeypatch.setattr(live, "POLL_S", 0.001)

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce()
        await until(lambda: not pool.loads())
        taking = asyncio.ensure_future(named_in(pool).apply(LiveOptions(lora_modules={"sql": "/adapters/sql"})))
        await asyncio.sleep(0.01)
        assert not taking.done()
        source.announce("a")
        await taking
        assert knows(pool, "sql")
        monkeypatch.setattr(live, "ENGINES_S", 0.0)
        source.announce()
        await until(lambda: not pool.loads())
        with pytest.raises(ValueError, match=r"^user_config\.lora_modules: no engine has read 'code'$"):
            await named_in(pool).apply(LiveOptions(lora_modules={"code": "/adapters/code"}))

    run(scenario, "a")
