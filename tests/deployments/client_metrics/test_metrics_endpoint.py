"""`GET /metrics`: vLLM's names over all engines, at every router; a hanging engine delays no scrape."""

import asyncio
from typing import Any

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from tests.deployments.http_world import FakePool
from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from tests.deployments.metrics.test_scrapes import samples, samples_of
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.metrics.monitor import Monitor


def scraped(monitor: Monitor) -> dict[tuple[str, ...], float]:
    return samples(asyncio.run(Client(monitor).get()).text)


def test_figures_of_all_engines_are_shown_by_engine_and_model():
    got = scraped(Engines(a=engine_stats(), b=engine_stats(num_running=7)).monitor())
    assert got["vllm:num_requests_running", "a", "demo"] == 2
    assert got["vllm:num_requests_running", "b", "demo"] == 7
    assert got["vllm:kv_cache_usage_perc", "a", "demo"] == 0.25
    assert got["vllm:prefix_cache_hits_total", "a", "demo"] == 16
    assert got["vllm:num_requests_waiting", "a", "demo"] == 3
    assert got["vllm:num_requests_waiting_by_reason", "a", "demo", "capacity"] == 2
    assert got["vllm:num_requests_waiting_by_reason", "a", "demo", "deferred"] == 1
    assert got["vllm:cache_config_info", "16", "a", "demo", "101"] == 1
    assert got["wingbeat_tree_config_info", "True", "5", "a", "demo"] == 1
    assert got["wingbeat_round_cost_seconds", "a", "demo", "draft", "1"] == 0.125
    assert got["wingbeat_break_even_acceptance_length", "a", "demo"] == 1.75
    assert got["wingbeat_engine_restarts_total", "a", "demo"] == 1
    assert got["wingbeat_self_test_passed", "a", "demo"] == 1
    assert got["wingbeat_drafter_state", "a", "demo", "attached"] == 1
    assert got["wingbeat_drafter_state", "a", "demo", "lost"] == 0
    assert got["wingbeat_drafter_restarts_total", "a", "demo"] == 1
    assert got["wingbeat_plain_rounds_total", "a", "demo", "plain"] == 2
    assert got["wingbeat_accepted_tokens_total", "1-512", "a", "demo"] == 6
    assert [got["wingbeat_trees_by_accepted_depth_total", str(d), "a", "demo"] for d in range(4)] == [1, 1, 1, 1]


def bench_reading(text: str) -> dict[str, Any]:
    """Counts as `vllm bench serve` reads them: by prefix of the line, then by the words that it contains."""
    found: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "positions": {}}
    for line in filter(None, map(str.strip, text.split("\n"))):
        if not line.startswith("vllm:spec_decode"):
            continue
        value = int(float(line.split()[-1]))
        if "num_drafts" in line:
            found["drafts"] += value
        elif "num_draft_tokens" in line:
            found["draft_tokens"] += value
        elif "num_accepted_tokens_per_pos" in line:
            position = int(line.partition('position="')[2].partition('"')[0])
            found["positions"][position] = found["positions"].get(position, 0) + value
        elif "num_accepted_tokens" in line:
            found["accepted"] += value
    return found


def test_vllms_benchmark_reads_the_acceptance_of_all_engines():
    monitor = Engines(a=engine_stats(), b=engine_stats()).monitor()
    text = asyncio.run(Client(monitor).get()).text
    positions = {0: 6, 1: 4, 2: 2, 3: 0, 4: 0}
    assert bench_reading(text) == {"drafts": 8, "draft_tokens": 40, "accepted": 12, "positions": positions}


def test_an_engine_without_a_drafter_shows_no_acceptance():
    got = scraped(Engines(a=engine_stats(num_drafters_attached=0, drafter_state="none")).monitor())
    assert not [name for name, *_ in got if name.startswith("vllm:spec_decode")]


def test_latencies_are_what_clients_saw():
    async def scenario() -> dict[tuple[str, ...], float]:
        pool = FakePool("hello world", engine_id="a")
        client = Client(Engines(a=engine_stats()).monitor(), pool)
        for _ in range(3):
            assert (await client.complete()).status_code == 200
        await client.complete(stop=["wor"])
        await client.complete(model="other")
        return samples((await client.get()).text)

    got = asyncio.run(scenario())
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_time_per_output_token_seconds"):
        assert got[f"vllm:{name}_count", "a", "demo"] == 4
    # Twelve tokens each, and nine until the stop string is there; the first one is no gap.
    assert got["vllm:inter_token_latency_seconds_count", "a", "demo"] == 3 * 11 + 8
    assert got["vllm:request_generation_tokens_sum", "a", "demo"] == 3 * 12 + 9
    assert got["vllm:request_prompt_tokens_sum", "a", "demo"] == 8
    assert got["vllm:request_success_total", "a", "stop", "demo"] == 4
    assert got["vllm:request_success_total", "a", "length", "demo"] == 0
    assert got["vllm:e2e_request_latency_seconds_bucket", "a", "+Inf", "demo"] == 4
    assert got["wingbeat_router_answers_total", "r1", "200"] == 4
    assert got["wingbeat_router_answers_total", "r1", "404"] == 1


def test_n_counts_once_for_each_prompt():
    async def scenario() -> dict[tuple[str, ...], float]:
        client = Client(Engines(a=engine_stats()).monitor(), FakePool(engine_id="a"))
        assert (await client.complete(prompt=["a", "b"], n=3)).status_code == 200
        assert (await client.complete()).status_code == 200
        return samples((await client.get()).text)

    got = asyncio.run(scenario())
    assert got["vllm:request_params_n_count", "a", "demo"] == 3
    assert got["vllm:request_params_n_sum", "a", "demo"] == 7
    assert got["vllm:request_params_n_bucket", "a", "2.0", "demo"] == 1
    assert got["vllm:e2e_request_latency_seconds_count", "a", "demo"] == 7


def test_requests_that_fail_or_are_left_count_as_such():
    async def scenario() -> dict[tuple[str, ...], float]:
        failing, hanging = FakePool(engine_id="a"), FakePool(engine_id="a")
        failing.fail_after, hanging.hang_after = (1, RuntimeError("broken by the test")), 1
        monitor = Engines(a=engine_stats()).monitor()
        assert (await Client(monitor, failing).complete()).status_code == 500
        left = asyncio.ensure_future(Client(monitor, hanging).complete())
        while not hanging.running:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        return samples((await Client(monitor).get()).text)

    got = asyncio.run(scenario())
    assert got["vllm:request_success_total", "a", "error", "demo"] == 1
    assert got["vllm:request_success_total", "a", "abort", "demo"] == 1


def test_every_router_shows_what_the_clients_of_all_routers_saw():
    async def scenario() -> list[dict[tuple[str, ...], float]]:
        engines = Engines(a=engine_stats())
        monitors = [engines.monitor(name) for name in ("r1", "r2")]
        clients = [Client(monitor, FakePool(engine_id="a")) for monitor in monitors]
        for count, client in enumerate(clients, 1):
            for _ in range(count):
                await client.complete()
        await clients[0].get()
        return [samples((await client.get()).text) for client in reversed(clients)]

    for got in asyncio.run(scenario())[:1]:
        assert got["vllm:time_to_first_token_seconds_count", "a", "demo"] == 3
        assert got["wingbeat_router_answers_total", "r1", "200"] == 1
        assert got["wingbeat_router_answers_total", "r2", "200"] == 2


PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
TEXT, OPENMETRICS = "text/plain; version=0.0.4", "application/openmetrics-text; version=1.0.0"
ACCEPTED = {
    "": TEXT,
    "*/*": TEXT,
    "text/plain": TEXT,
    "text/plain;version=0.0.4": TEXT,
    "text/plain;version=1.0.0;escaping=underscores": TEXT,
    "text/plain;version=1.0.0;escaping=values": TEXT,
    f"{PROTOBUF},*/*;q=0.1": TEXT,
    "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1": TEXT,
    "application/openmetrics-text": OPENMETRICS,
    # Prometheus 2.42, and one of the 3 series.
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1": OPENMETRICS,
    f"{PROTOBUF};q=0.6,application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1": OPENMETRICS,
    "application/openmetrics-text;version=1.0.0;escaping=dots": OPENMETRICS,
    "application/openmetrics-text;version=2.0.0;escaping=underscores": OPENMETRICS,
}
"""Values of `Accept` and the format that answers them."""


def strictly_read(page: httpx.Response) -> dict[tuple[str, ...], float]:
    """The lines of a page by a parser of its own format; a line must belong to a family of a declared type."""
    is_openmetrics = page.headers["content-type"].startswith("application/openmetrics-text")
    read = openmetrics_parser if is_openmetrics else text_string_to_metric_families
    families = list(read(page.text))
    assert {family.name for family in families if family.type in ("unknown", "untyped")} == set()
    assert all(sample.name.startswith(family.name) for family in families for sample in family.samples)
    return samples_of(families)


def test_names_and_values_are_the_same_for_every_accept_header():
    access = Access.of_server("127.0.0.1", api_keys=None, allowed_hosts=["wingbeat"])

    async def scenario() -> list[httpx.Response]:
        client = Client(Engines(a=engine_stats()).monitor(), FakePool(engine_id="a"), access=access)
        await client.complete()
        return [await client.get(accept=accept) for accept in ACCEPTED]

    pages = asyncio.run(scenario())
    for page, media_type in zip(pages, ACCEPTED.values(), strict=True):
        assert page.headers["content-type"] == f"{media_type}; charset=utf-8"
    first, *others = map(strictly_read, pages)
    assert first["vllm:num_requests_running", "a", "demo"] == 2
    assert len([name for name, *_ in first if name.startswith("vllm:")]) > 100
    for other in others:
        # Its value is the moment of the reading.
        moments = {key for key in first if key[0] == "vllm:lora_requests_info"}
        assert other.keys() == first.keys()
        assert {key for key in first if first[key] != other[key]} <= moments
