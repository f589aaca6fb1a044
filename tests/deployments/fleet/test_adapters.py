"""Every router and every replica has the same list of adapters, whoever changed it and whoever comes later."""

import asyncio

import pytest

from tests.deployments.pool_world import LocalEngines, collect, make_request, run
from wingbeat.cluster.routing import PromptBlocks
from wingbeat.deployments.fleet import named_adapters
from wingbeat.deployments.fleet.catalog import Catalog, CatalogEntry
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.fleet.named_adapters import NamedAdapters
from wingbeat.runtime.scheduling.request import AdapterName

SQL = AdapterName("sql", "/adapters/sql", "d1")


async def routers(source: LocalEngines, count: int) -> list[EnginePool]:
    pools = [EnginePool(source, max_num_seqs=16, max_queued_requests=16) for _ in range(count)]
    for pool in pools:
        await pool.start()
        await until(lambda pool=pool: bool(pool.loads()))
    return pools


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def knows(pool: EnginePool, *names: str) -> bool:
    return [adapter.name for adapter in pool.adapters.catalog.things] == list(names)


def test_the_last_change_of_a_name_counts_in_whatever_order_it_is_heard():
    first, second, late = (Catalog() for _ in range(3))
    for catalog in (first, second):
        catalog.merge([CatalogEntry("sql", 0, SQL)])
    first.put("sql", None)
    second.merge(first.changes())
    second.put("sql", SQL._replace(digest="d2"))
    late.merge(second.changes())
    assert not late.merge(first.changes())
    assert late.find("sql").digest == "d2"
    assert first.merge(second.changes())
    assert first.things == late.things


def test_a_change_counts_over_those_that_its_router_had_heard_of_whatever_the_clocks_say(monkeypatch):
    fast, slow, late = (Catalog() for _ in range(3))
    monkeypatch.setattr("time.time_ns", lambda: 10**18 + 3600 * 10**9)
    fast.put("sql", SQL)
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    slow.merge(fast.changes())
    slow.put("sql", None)
    for changes in (fast.changes(), slow.changes()):
        late.merge(changes)
    assert (late.find("sql"), late.changes()) == (None, slow.changes())


def test_a_change_reaches_every_router_and_those_that_come_later():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        (other,) = await routers(source, 1)
        await pool.adapters.load("sql", "/adapters/sql")
        await until(lambda: knows(other, "sql"))
        (later,) = await routers(source, 1)
        await until(lambda: knows(later, "sql"))
        await later.adapters.unload("sql")
        await until(lambda: knows(pool) and knows(other))
        for one in (other, later):
            await one.close()

    run(scenario, "a", "b")


def test_a_replica_that_comes_is_told_by_the_routers():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce("a")
        await until(lambda: len(pool.loads()) == 1)
        await pool.adapters.load("sql", "/adapters/sql")
        assert source.names["b"].catalogs["adapters"].find("sql") is None
        source.announce("a", "b")
        await until(lambda: source.names["b"].catalogs["adapters"].find("sql") is not None)

    run(scenario, "a", "b")


def test_requests_travel_with_their_adapter():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        from dataclasses import replace

        await collect(pool, replace(make_request("one"), adapter=SQL))
        assert [request.adapter for request in source.engines["a"].taken] == [SQL]

    run(scenario, "a")


def test_without_an_engine_nothing_is_loaded():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce()
        await until(lambda: not pool.loads())
        try:
            await pool.adapters.load("sql", "/adapters/sql")
        except EngineUnavailable:
            assert knows(pool)
        else:
            raise AssertionError("an adapter was loaded into no engine")

    run(scenario, "a")


def test_a_prefix_is_known_under_its_adapter_alone():
    prompt = list(range(9))
    hashes = {PromptBlocks(prompt, 4, salt, adapter).hash(1) for salt in ("", "s") for adapter in ("", "d1", "d2")}
    assert len(hashes) == 6


def test_named_adapters_come_and_go_and_what_is_named_by_two_routers_is_loaded_once_more():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        (other,) = await routers(source, 1)
        ones, others = NamedAdapters(pool.adapters), NamedAdapters(other.adapters)
        for named in (ones, others):
            await named.take({"sql": "/adapters/sql", "code": "/adapters/code"})
        await until(lambda: knows(pool, "sql", "code") and knows(other, "sql", "code"))
        await pool.adapters.load("by_http", "/adapters/http")
        for named in (ones, others):
            await named.take({"code": "/adapters/code"})
        await until(lambda: knows(pool, "code", "by_http") and knows(other, "code", "by_http"))
        await ones.take({})
        await until(lambda: knows(other, "by_http"))
        await other.close()

    run(scenario, "a")


def test_a_named_adapter_waits_for_an_engine(monkeypatch):
    monkeypatch.setattr(named_adapters, "POLL_S", 0.001)

    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce()
        await until(lambda: not pool.loads())
        taking = asyncio.ensure_future(NamedAdapters(pool.adapters).take({"sql": "/adapters/sql"}))
        await asyncio.sleep(0.01)
        assert not taking.done()
        source.announce("a")
        await taking
        assert knows(pool, "sql")
        monkeypatch.setattr(named_adapters, "ENGINES_S", 0.0)
        source.announce()
        await until(lambda: not pool.loads())
        with pytest.raises(ValueError, match=r"^user_config\.lora_modules: no engine has read 'code'$"):
            await NamedAdapters(pool.adapters).take({"code": "/adapters/code"})

    run(scenario, "a")
