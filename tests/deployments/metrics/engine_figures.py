"""Figures of an engine as they travel, and a router that shows them."""

from dataclasses import asdict
from typing import Any

import httpx

from tests.deployments.http_world import TOKENIZER, URL, FakePool
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.metrics.fleet_figures import FleetFigures
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.parts import first_result
from wingbeat.runtime.engine.engine_stats import EngineStats
from wingbeat.runtime.engine.speculation import PolicyStats
from wingbeat.runtime.metrics import Histogram, SpeculationMetrics

SPECULATION = SpeculationMetrics(4, 20, 6, [3, 2, 1])


def engine_stats(**fields: Any) -> EngineStats:
    """Statistics of an engine with a drafter that has verified four trees."""
    given = {
        "num_running": 2,
        "num_waiting": 3,
        "num_deferred": 1,
        "num_free_blocks": 75,
        "num_pinned_blocks": 5,
        "num_blocks": 101,
        "num_preemptions": 3,
        "drafter_state": "attached",
        "num_drafters_attached": 2,
        "num_replayed_tokens": 9,
        "speculation": SPECULATION,
        "policy": PolicyStats(
            {"speculate": 5, "plain": 2}, break_even=1.75, costs_s={"plain": {1: 0.25}, "draft": {1: 0.125}}
        ),
        "prefix_query_tokens": 40,
        "prefix_hit_tokens": 16,
        "plain_rounds": {"plain": 2, "idle": 1},
        "by_context": {"1-512": SPECULATION, "513-2048": SpeculationMetrics()},
        "tree_nodes": Histogram((1, 8), [0, 4, 0], 20.0),
        "num_spec_tokens": 5,
        "by_head": {0: (3, 12, 4, 6), 1: (1, 8, 2, 4)},
        "head_version": 1,
        "parts": {"media": {"num_encoded": 2, "num_hits": 5, "num_bytes": 4096}},
        "cache_config": {"block_size": "16", "num_gpu_blocks": "101"},
        "tree_config": {"draft_steps": "5", "adaptive": "True"},
        "request_labels": {"max_lora": "8", "waiting_lora_adapters": "", "running_lora_adapters": "poet,lawyer"},
        "stages": {"verifier": {"captured": 9, "failed": 1, "eager": 2}},
        "device_s": {"verify": 1.5, "draft_levels": 0.5},
    }
    return EngineStats(**given | fields)


class Engines:
    """Engines behind routers: each has figures and keeps the reports that it gets, as a verifier's replica does."""

    def __init__(self, **stats: EngineStats) -> None:
        self.stats = stats
        self.reports = {name: first_result("router_reports") for name in stats}
        self.num_asked = 0

    async def ask(self, engine_id: str, report: dict[str, Any] | None) -> dict[str, Any]:
        """The answer of `Verifier.stats`."""
        self.num_asked += 1
        reports = self.reports[engine_id]
        own = {"drafter_lacks_room": False, "weights": ""} | ({} if reports is None else reports.exchange(report))
        own["recording"] = {"num_sequences": 5, "num_tokens": 900, "num_dropped": 1, "stopped": None}
        own |= {"num_engine_restarts": 1, "self_test": {"passed": True}}
        own["heads"] = {"decisions": {"promoted": 1}, "learner": {"seconds": 2.0, "samples": 3, "bytes": 4}}
        return asdict(self.stats[engine_id]) | own

    def monitor(self, router_id: str = "r1", **settings: Any) -> Monitor:
        """The monitor of a router."""
        own = first_result("router_figures", router_id)
        fleet = FleetFigures("demo", self.ids, self.ask, own, **settings)
        return Monitor((fleet,), () if own is None else (own,))

    def ids(self) -> frozenset[str]:
        """Ids of the live engines."""
        return frozenset(self.stats)


class Client:
    """Requests to one router over a scripted pool."""

    def __init__(
        self, monitor: Monitor, pool: FakePool | None = None, access: Access | None = None, **more: Any
    ) -> None:
        service = CompletionService(
            pool or FakePool(),
            TOKENIZER,
            figures=next((one for one in monitor.watchers if hasattr(one, "measured")), None),
        )
        self._app = create_app(service, access, monitor=monitor, **more)

    async def get(self, path: str = "/metrics", **headers: str) -> httpx.Response:
        async with self._client() as client:
            return await client.get(path, headers=headers)

    async def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "demo", "prompt": "hi", "max_tokens": 40, **fields}
        async with self._client() as client:
            return await client.post("/v1/completions", json=body, headers=headers)

    def _client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url=URL)
