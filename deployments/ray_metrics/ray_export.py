"""Publishes an engine's figures as Ray metrics, from the engine's replica. The metrics are the families of `/metrics`.

Ray's exporters publish these metrics together with the figures of nodes and deployments, under the names `ray_vllm_...`
and `ray_wingbeat_...`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from prometheus_client import Metric
from ray.util import metrics as ray_metrics

from wingbeat.deployments.metrics.exposition import SnapshotCollector
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.deployments.replica.engine_client import EngineFailed

EXPORT_EVERY_S = 5.0


async def publish(model_name: str, engine_id: str, stats: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    """Publish an engine's figures every `EXPORT_EVERY_S`, for ever; while there is no engine, nothing is published."""
    export = RayExport()
    while True:
        await asyncio.sleep(EXPORT_EVERY_S)
        with contextlib.suppress(EngineFailed):
            snapshot = FleetSnapshot(model_name, {engine_id: await stats()})
            await asyncio.to_thread(export.publish, SnapshotCollector(snapshot).collect())


class RayExport:
    """Publishes families of prometheus_client as Ray metrics.

    Ray's histograms accept only single values. Therefore the buckets, sums and counts of histograms are published as
    gauges. Counters cannot be used for these values, because Ray would append `_total` to the names.

    Args:
        api: `ray.util.metrics`, or a replacement for it.
    """

    def __init__(self, api: Any = ray_metrics) -> None:
        self._api = api
        self._metrics: dict[str, Any] = {}
        self._told: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        """Last published value of each counter. The values are needed because Ray's counters accept only increments."""
        self._infos: dict[str, dict[str, str]] = {}
        """Latest labels of each metric whose name ends in `_info`. An engine has one row of each such metric."""

    def publish(self, families: Iterable[Metric]) -> None:
        """Publish the current values of families."""
        for family in families:
            for sample in family.samples:
                # Ray's metric names must not contain colons.
                name = sample.name.replace(":", "_")
                if family.type == "counter":
                    metric = self._metric(self._api.Counter, name, family, sample.labels)
                    self._count(metric, name, sample.labels, sample.value)
                else:
                    metric = self._metric(self._api.Gauge, name, family, sample.labels)
                    if name.endswith("_info"):
                        if (before := self._infos.get(name, sample.labels)) != sample.labels:
                            metric.set(0, before)
                        self._infos[name] = sample.labels
                    metric.set(sample.value, sample.labels)

    def _metric(self, kind: Any, name: str, family: Metric, labels: dict[str, str]) -> Any:
        if name not in self._metrics:
            self._metrics[name] = kind(name, description=family.documentation, tag_keys=tuple(labels))
        return self._metrics[name]

    def _count(self, metric: Any, name: str, labels: dict[str, str], value: float) -> None:
        key = (name, tuple(sorted(labels.items())))
        told = self._told.get(key, 0.0)
        # If a value is below the last value, it comes from a new engine, which counts from zero.
        step = value if value < told else value - told
        self._told[key] = value
        if step > 0:
            metric.inc(step, labels)
