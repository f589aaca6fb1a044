"""Figures of an engine as they travel, and a router that shows them."""

from dataclasses import asdict
from typing import Any

from wingbeat.deployments.metrics.client_figures import RouterFigures
from wingbeat.deployments.metrics.fleet_figures import FleetFigures
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.metrics.router_reports import RouterReports
from wingbeat.runtime.engine.engine_stats import EngineStats
from wingbeat.runtime.histogram import Histogram
from wingbeat.runtime.scheduling.request import SpeculationMetrics
from wingbeat.runtime.speculation.policy import PolicyStats

SPECULATION = SpeculationMetrics(4, 20, 6, [3, 2, 1])


def engine_stats(**fields: Any) -> EngineStats:
    """Of an engine with a drafter that has verified four trees."""
    given = {
        "num_running": 2,
        "num_waiting": 1,
        "num_free_blocks": 75,
        "num_blocks": 101,
        "num_preemptions": 3,
        "drafter_state": "attached",
        "num_drafters_attached": 2,
        "num_replayed_tokens": 9,
        "speculation": SPECULATION,
        "policy": PolicyStats({"speculate": 5, "plain": 2}),
        "prefix_query_tokens": 40,
        "prefix_hit_tokens": 16,
        "plain_rounds": {"plain": 2, "idle": 1},
        "by_context": {"1-512": SPECULATION, "513-2048": SpeculationMetrics()},
        "tree_nodes": Histogram((1, 8), [0, 4, 0], 20.0),
        "num_spec_tokens": 5,
        "cache_config": {"block_size": "16", "num_gpu_blocks": "101"},
    }
    return EngineStats(**given | fields)


class Engines:
    """Engines behind routers: each has figures and keeps the reports that it gets, as a verifier's replica does."""

    def __init__(self, **stats: EngineStats) -> None:
        self.stats = stats
        self.reports = {name: RouterReports() for name in stats}
        self.num_asked = 0

    async def ask(self, engine_id: str, report: dict[str, Any]) -> dict[str, Any]:
        """What `Verifier.stats` answers."""
        self.num_asked += 1
        reports = self.reports[engine_id]
        reports.add(report)
        return {**asdict(self.stats[engine_id]), "clients": reports.clients(), "routers": reports.routers()}

    def monitor(self, router_id: str = "r1", **settings: Any) -> Monitor:
        """One router's."""
        own = RouterFigures(router_id)
        return Monitor(own, FleetFigures("demo", lambda: frozenset(self.stats), self.ask, own, **settings))
