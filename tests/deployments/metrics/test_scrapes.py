"""`GET /metrics`: figures of all engines; a hanging engine delays no scrape."""

import asyncio
from collections.abc import Iterable
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from wingbeat.deployments.metrics.fleet_figures import FleetFigures
from wingbeat.deployments.metrics.monitor import Monitor


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and label values, in the order of the labels' names."""
    return samples_of(text_string_to_metric_families(text))


def samples_of(families: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    """As `samples`, of families that were read already."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_an_engine_that_does_not_answer_is_left_out_and_said():
    async def scenario() -> dict[tuple[str, ...], float]:
        engines = Engines(a=engine_stats(), stuck=engine_stats(), gone=engine_stats())

        async def ask(engine_id: str, report: dict[str, Any] | None) -> dict[str, Any]:
            if engine_id == "stuck":
                await asyncio.Event().wait()
            if engine_id == "gone":
                raise ConnectionError("killed by the test")
            return await engines.ask(engine_id, report)

        fleet = FleetFigures("demo", lambda: frozenset(engines.stats), ask, patience_s=0.05)
        return samples((await Client(Monitor((fleet,))).get()).text)

    got = asyncio.run(scenario())
    assert {name[1] for name in got if name[0] == "wingbeat_kv_blocks"} == {"a"}
    ups = {name[1]: value for name, value in got.items() if name[0] == "wingbeat_engine_up"}
    assert ups == {"a": 1, "stuck": 0, "gone": 0}


def test_scrapes_of_a_moment_ask_the_engines_once():
    async def scenario() -> tuple[int, int]:
        now = [100.0]
        engines = Engines(a=engine_stats(), b=engine_stats())
        client = Client(engines.monitor(clock=lambda: now[0]))
        await asyncio.gather(*(client.get() for _ in range(5)))
        await client.get()
        first = engines.num_asked
        now[0] += 2.0
        await client.get()
        return first, engines.num_asked

    assert asyncio.run(scenario()) == (2, 4)
