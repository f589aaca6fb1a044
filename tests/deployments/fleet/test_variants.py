"""Variants of a model: a change of one affects only its requests, and a request's cache depends on its variant."""

from dataclasses import replace

from tests.deployments.pool_world import LocalEngines, collect, make_request, run
from wingbeat.cluster.routing import PromptBlocks
from wingbeat.deployments.fleet.catalog import Catalog, CatalogEntry
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.runtime.scheduling.request import Variant

SQL = Variant("sql", "/variants/sql", "d1")


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


def test_requests_travel_with_their_variant():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        await collect(pool, replace(make_request("one"), variant=SQL))
        assert [request.variant for request in source.engines["a"].taken] == [SQL]

    run(scenario, "a")


def test_a_prefix_is_known_under_its_variant_alone():
    prompt = list(range(9))
    hashes = {PromptBlocks(prompt, 4, salt, variant).hash(1) for salt in ("", "s") for variant in ("", "d1", "d2")}
    assert len(hashes) == 6
