"""Names of metrics: the dashboard uses exported ones only, and the documentation lists all."""

import asyncio
import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric

from tests.deployments.http_world import FakePool
from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from tests.optional import FEATURES, is_deleted, is_gone
from wingbeat.deployments.metrics import rows
from wingbeat.deployments.metrics.exposition import SnapshotCollector
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.runtime.engine.engine_stats import EngineStats

ROOT = Path(__file__).parents[3]
NAME = re.compile(r"\b(?:vllm:|wingbeat_)\w+")
VLLM_DASHBOARD = (
    *("e2e_request_latency_seconds_bucket", "prompt_tokens_total", "generation_tokens_total"),
    *("inter_token_latency_seconds_bucket", "num_requests_running", "num_requests_waiting"),
    *("time_to_first_token_seconds_bucket", "kv_cache_usage_perc", "request_prompt_tokens_bucket"),
    *("request_generation_tokens_bucket", "request_success_total", "request_queue_time_seconds_sum"),
    *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    *("request_max_num_generation_tokens_sum", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
    *("request_time_per_output_token_seconds_sum", "num_preemptions_total", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "request_inference_time_seconds_sum", "iteration_tokens_total_bucket"),
    *("request_params_max_tokens_bucket", "cache_config_info", "num_requests_waiting_by_reason"),
    *("request_params_n_bucket", "request_num_preemptions_bucket"),
)
"""Samples that vLLM's own dashboards and benchmarks read."""
READ_BY = {"parts": "media", "by_text": "suffix_beside"}
UNREAD = ("graphs", *(figure for figure, feature in READ_BY.items() if is_deleted(FEATURES[feature])))
"""Figures of an engine that are no metrics."""


@pytest.fixture(scope="module")
def families() -> list[Metric]:
    async def scenario() -> list[Metric]:
        monitor = Engines(a=engine_stats()).monitor()
        await Client(monitor, FakePool(engine_id="a")).complete()
        return list(SnapshotCollector(await monitor.fleets[0].snapshot()).collect())

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def shown(families) -> set[str]:
    """Names of lines."""
    return {sample.name for family in families for sample in family.samples}


def test_every_name_in_the_dashboard_is_shown(shown):
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    asked = {name for query in queries for name in NAME.findall(query)}
    assert len(asked) > 40
    assert [name for name in sorted(asked - shown) if not is_gone(name)] == []


def test_panels_have_ids_and_places_of_their_own():
    panels = json.loads((ROOT / "examples" / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_what_vllms_dashboards_read_is_shown(shown):
    assert [name for name in VLLM_DASHBOARD if f"vllm:{name}" not in shown] == []


def test_the_documentation_lists_exactly_what_is_shown(families):
    listed = set(re.findall(r"^\| `((?:vllm:|wingbeat_)\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    listed = {name for name in listed if not is_gone(name)}
    assert (sorted(listed - names), sorted(names - listed)) == ([], [])


def test_no_moment_of_creation_is_shown(shown):
    """Benchmarks sum up lines by their beginnings, and would count it."""
    assert [name for name in shown if name.endswith("_created")] == []


def test_every_row_has_a_value_in_this_world(families):
    assert [family.name for family in families if not family.samples] == []


def collected(caplog, figures: dict[str, Any]) -> set[str]:
    """Names of families with a row; log records are in `caplog`."""
    rows.say_missing.cache_clear()
    replicas = {"clients": None, "routers": {}, "drafter_lacks_room": False, "weights": ""}
    replicas |= {"num_engine_restarts": 0, "self_test": None}
    snapshot = FleetSnapshot("demo", {"a": figures | replicas})
    with caplog.at_level("WARNING"):
        return {family.name for family in SnapshotCollector(snapshot).collect() if family.samples}


def test_an_engine_without_drafter_policy_media_and_clients_lacks_no_figure(caplog):
    stats = engine_stats(num_drafters_attached=0, policy=None, parts={}, tree_nodes=None)
    assert "vllm:num_preemptions" in collected(caplog, asdict(stats))
    assert caplog.records == []


@pytest.mark.parametrize("name", [field.name for field in fields(EngineStats) if field.name not in UNREAD])
def test_a_figure_that_is_gone_is_said_once_and_takes_few_others_with_it(caplog, name):
    figures = asdict(engine_stats())
    whole = collected(caplog, figures)
    assert caplog.records == []
    del figures[name]
    left = collected(caplog, figures)
    assert left < whole
    assert len(whole - left) < len(whole) / 2
    assert [record.args for record in caplog.records] == [("a", repr(KeyError(name)))]
