"""Dashboards over Ray's metrics: Ray's stock one of Serve LLM finds its series, and ours is that of `/metrics`."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from tests.deployments.http_world import FakePool
from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from tests.deployments.ray_metrics.test_ray_export import FakeRay
from tests.optional import is_gone
from wingbeat.deployments.metrics.exposition import SnapshotCollector
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.ray_metrics.ray_export import RayExport

EXAMPLES = Path(__file__).parents[3] / "examples"
OF_PARTS_NOT_HERE = ("ray_vllm_nixl_", "ray_vllm_kv_offload_", "ray_vllm_external_prefix_cache_")
"""Metrics in Ray's dashboard that Wingbeat lacks: KV sent to other engines, kept on the host, or in external caches."""
OF_ROUTERS = ("wingbeat_router_", "wingbeat_engine_up")
"""Families that a router makes; replicas publish their engines' alone."""
_NAME = re.compile(r"\bray_(?:vllm|wingbeat)_\w+")


@pytest.fixture(scope="module")
def published() -> set[str]:
    """Names of metrics in Ray's exporters, for an engine that has served requests."""

    async def families() -> list[Metric]:
        monitor = Engines(a=engine_stats()).monitor()
        await Client(monitor, FakePool(engine_id="a")).complete()
        snapshot = await monitor.fleets[0].snapshot()
        return list(SnapshotCollector(FleetSnapshot("demo", snapshot.engines)).collect())

    ray = FakeRay()
    RayExport(ray).publish(asyncio.run(families()))
    return {f"ray_{name}" for name in ray.kinds}


def test_rays_stock_dashboard_of_serve_llm_finds_every_series_of_an_engine_like_ours(published: set[str]):
    factory = pytest.importorskip("ray.dashboard.modules.metrics.grafana_dashboard_factory")
    dashboard = json.loads(factory.generate_serve_llm_grafana_dashboard()[0])
    asked = set(_NAME.findall(json.dumps(dashboard)))
    assert len(asked) > 40
    missing = {name for name in asked - published if not (name.startswith(OF_PARTS_NOT_HERE) or is_gone(name))}
    assert sorted(missing) == []
    assert all(any(name.startswith(part) for name in asked) for part in OF_PARTS_NOT_HERE)


def test_rays_dashboard_joins_series_by_labels_that_ours_have(published: set[str]):
    """`WorkerId` is added by Ray, to metrics of the process that publishes them: the replica that Serve counts."""
    factory = pytest.importorskip("ray.dashboard.modules.metrics.grafana_dashboard_factory")
    text = factory.generate_serve_llm_grafana_dashboard()[0]
    labels = {label for part in re.findall(r"ray_vllm_\w+\{([^}]*)\}", text) for label in re.findall(r"(\w+)=", part)}
    assert {"model_name"} <= labels <= {"model_name", "WorkerId", "ray_io_cluster", "deployment", "SessionName"}


def test_the_dashboard_over_rays_metrics_is_that_of_metrics(published: set[str]):
    found = json.loads((EXAMPLES / "grafana_ray.json").read_text())
    assert found == over_ray(json.loads((EXAMPLES / "grafana.json").read_text()))
    asked = set(_NAME.findall(json.dumps(found)))
    assert len(asked) > 40
    assert [name for name in sorted(asked - published) if not is_gone(name)] == []
    assert sum("spec_decode" in name or "wingbeat" in name for name in asked) > 15


def over_ray(dashboard: dict[str, Any]) -> dict[str, Any]:
    """The dashboard over Ray's exported metrics; without panels of routers, for which Ray has its own."""
    panels = [panel for panel in dashboard["panels"] if not any(name in json.dumps(panel) for name in OF_ROUTERS)]
    text = json.dumps({**dashboard, "panels": list(_moved_up(panels))})
    text = re.sub(r"\bvllm:(\w+)", r"ray_vllm_\1", text)
    text = re.sub(r"\b(?<!ray_)wingbeat_(\w+)", r"ray_wingbeat_\1", text)
    named = {"title": "Wingbeat on Ray", "uid": "wingbeatRay", "description": "Engines, by Ray's own metrics."}
    return json.loads(text) | named


def _moved_up(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The panels without gaps: each row is moved up to the row above."""
    rows = sorted({panel["gridPos"]["y"] for panel in panels})
    top = 0
    for row in rows:
        own = [panel for panel in panels if panel["gridPos"]["y"] == row]
        yield from ({**panel, "gridPos": {**panel["gridPos"], "y": top}} for panel in own)
        top += max(panel["gridPos"]["h"] for panel in own)


def write() -> None:
    """Make the dashboard over Ray's metrics anew."""
    dashboard = over_ray(json.loads((EXAMPLES / "grafana.json").read_text()))
    (EXAMPLES / "grafana_ray.json").write_text(json.dumps(dashboard, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
