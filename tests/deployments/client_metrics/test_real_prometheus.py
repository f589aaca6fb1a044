"""A real Prometheus reads `/metrics`; skipped if Debian's package is not installed."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from tests.deployments.http_world import TOKENIZER, FakePool
from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from tests.deployments.metrics.prometheus_server import BINARY, Prometheus, dashboard_queries
from tests.ports import free_port
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.metrics.monitor import Monitor

pytestmark = pytest.mark.skipif(BINARY is None, reason="prometheus is not installed: apt-get install prometheus")
PATIENCE_S = 30.0


@contextmanager
def served(monitor: Monitor) -> Iterator[str]:
    """The application over a socket; yields its host and port."""
    port = free_port()
    app = create_app(CompletionService(FakePool(), TOKENIZER, figures=monitor.watchers[0]), monitor=monitor)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


def names_of(page: str) -> set[str]:
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


@pytest.mark.slow
def test_a_real_prometheus_stores_every_name_and_every_query_of_the_dashboard_has_a_series():
    monitor = Engines(a=engine_stats()).monitor()

    async def page() -> str:
        client = Client(monitor, FakePool(engine_id="a"))
        await client.complete()
        return (await client.get()).text

    names = names_of(asyncio.run(page()))
    assert len(names) > 90
    with served(monitor) as target, Prometheus(target, free_port()) as prometheus:
        queries, until = dashboard_queries(), time.monotonic() + PATIENCE_S
        # A rate needs two scrapes.
        while (empty := prometheus.empty(queries)) and time.monotonic() < until:
            time.sleep(0.5)
        assert prometheus.last_error() == ""
        assert (sorted(names - prometheus.names()), empty) == ([], [])
