"""The families of `/metrics` as Ray's metrics."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tests.deployments.metrics.engine_figures import Engines, engine_stats
from wingbeat.deployments.client_metrics.client_figures import RouterFigures
from wingbeat.deployments.metrics.exposition import SnapshotCollector
from wingbeat.deployments.parts import hooks
from wingbeat.deployments.ray_metrics import ray_export
from wingbeat.deployments.ray_metrics.ray_export import RayExport
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.runtime.engine.clocks import RequestTimes

Tags = tuple[str, ...]


class FakeRay:
    """`ray.util.metrics`, as far as values go."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = defaultdict(float)
        self.kinds: dict[str, str] = {}

    def _made(self, kind: str, name: str, tag_keys: Tags) -> "FakeMetric":
        assert name not in self.kinds, "Ray warns of a metric that is made twice"
        assert ":" not in name
        self.kinds[name] = kind
        return FakeMetric(self, name, tag_keys)

    def Gauge(self, name: str, description: str, tag_keys: Tags) -> "FakeMetric":
        return self._made("gauge", name, tag_keys)

    def Counter(self, name: str, description: str, tag_keys: Tags) -> "FakeMetric":
        return self._made("counter", name, tag_keys)


class FakeMetric:
    """A metric of Ray."""

    def __init__(self, ray: FakeRay, name: str, tag_keys: Tags) -> None:
        self._ray, self._name, self._tag_keys = ray, name, tag_keys

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert set(tags) == set(self._tag_keys)
        return (self._name, *(tags[name] for name in sorted(tags)))

    def set(self, value: float, tags: dict[str, str]) -> None:
        self._ray.values[self._key(tags)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses other steps"
        self._ray.values[self._key(tags)] += value


def test_published_twice_sums_are_those_of_the_page():
    ray, requests = FakeRay(), RequestTimes()
    requests.queue_s.observe(0.4)
    engines, export = Engines(a=engine_stats(requests=requests)), RayExport(ray)

    def publish() -> None:
        snapshot = asyncio.run(engines.monitor().fleets[0].snapshot())
        export.publish(SnapshotCollector(snapshot).collect())

    publish()
    requests.queue_s.observe(0.4)
    engines.stats["a"].num_running = 9
    publish()
    assert ray.values["vllm_num_requests_running", "a", "demo"] == 9
    assert ray.values["vllm_spec_decode_num_drafts_total", "a", "demo"] == 4
    assert ray.values["vllm_request_queue_time_seconds_bucket", "a", "0.5", "demo"] == 2
    assert ray.values["vllm_request_queue_time_seconds_count", "a", "demo"] == 2
    assert ray.values["vllm_request_queue_time_seconds_sum", "a", "demo"] == 0.8
    assert ray.kinds["vllm_spec_decode_num_drafts_total"] == "counter"
    # Ray would rename a counter.
    assert ray.kinds["vllm_request_queue_time_seconds_bucket"] == "gauge"


def test_labels_that_are_true_no_more_have_the_value_0():
    ray = FakeRay()
    export = RayExport(ray)
    for digest in ("settings", "d1", "d1"):
        family = GaugeMetricFamily("weights_info", "What is served.", labels=("engine", "weights"))
        family.add_metric(("a", digest), 1)
        export.publish([family])
    assert (ray.values["weights_info", "a", "settings"], ray.values["weights_info", "a", "d1"]) == (0, 1)


def test_a_counter_that_begins_anew_goes_on_where_the_last_one_ended():
    ray = FakeRay()
    export = RayExport(ray)
    for value in (5, 7, 0, 8):
        family = CounterMetricFamily("tokens", "Of an engine that took another's place.", labels=("engine",))
        family.add_metric(("a",), value)
        export.publish([family])
    assert ray.values["tokens_total", "a"] == 15


def test_a_replica_publishes_on_once_its_engine_has_been_replaced(monkeypatch: pytest.MonkeyPatch):
    ray, router = FakeRay(), RouterFigures("r1")
    engines, lost = Engines(a=engine_stats()), [True]
    monkeypatch.setattr(ray_export, "EXPORT_EVERY_S", 0)
    monkeypatch.setattr(ray_export, "RayExport", lambda: RayExport(ray))

    async def stats() -> dict[str, Any]:
        if lost:
            lost.pop()
            raise EngineFailed("gone")
        if engines.num_asked:
            raise InterruptedError
        return await engines.ask("a", router.report("a"))

    (publish,) = hooks("publish")
    with pytest.raises(InterruptedError):
        asyncio.run(publish("demo", "a", stats))
    assert ray.values["vllm_spec_decode_num_drafts_total", "a", "demo"] == 4
