"""OpenTelemetry spans of requests."""

import asyncio
import sys
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from pydantic import ValidationError

from tests.deployments.http_world import FakePool
from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.spans.settings import EXPORTER
from wingbeat.deployments.spans.tracing import RequestTracer
from wingbeat.deployments.spans.watcher import SpanWriter

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine-7"}


def spans_of(pool: FakePool, headers: dict[str, str] | None = None, path: str | None = None, **fields: object) -> list:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monitor = Engines(a=engine_stats()).monitor()
    writer = SpanWriter(RequestTracer(provider))
    client = Client(replace(monitor, watchers=[*monitor.watchers, writer]), pool)
    asyncio.run(client.complete(headers, **fields) if path is None else client.get(path))
    return list(exporter.get_finished_spans())


def test_a_request_and_its_choices_are_spans_of_the_callers_trace():
    *choices, request = spans_of(FakePool(engine_id="a"), CALLER, n=2, seed=1)
    assert request.name == "POST /v1/completions"
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["wingbeat.request_id"] == "mine-7"
    assert [choice.name for choice in choices] == ["llm_request"] * 2
    for choice in choices:
        assert choice.parent.span_id == request.context.span_id
        assert request.start_time <= choice.start_time <= choice.end_time <= request.end_time + 1000
        told = choice.attributes
        assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (2, 12)
        assert told["gen_ai.latency.time_in_queue"] == 0.25
        assert told["gen_ai.response.finish_reasons"] == ("stop",)
        assert told["wingbeat.engine"] == "a"
        assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
        assert [event.name for event in choice.events] == ["first_token"]


def test_a_stream_is_a_span_until_its_end():
    choice, request = spans_of(FakePool(engine_id="a"), stream=True)
    assert request.parent is None
    assert choice.parent.span_id == request.context.span_id
    assert choice.attributes["gen_ai.usage.completion_tokens"] == 12


def test_a_request_that_fails_is_an_error():
    pool = FakePool(engine_id="a")
    pool.fail_after = (1, RuntimeError("broken by the test"))
    choice, request = spans_of(pool)
    assert choice.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert (request.status.status_code, request.attributes["http.response.status_code"]) == (StatusCode.ERROR, 500)


def test_scrapes_and_health_checks_have_no_span():
    assert spans_of(FakePool(), path="/health") == spans_of(FakePool(), path="/metrics") == []


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.trace", EXPORTER])
def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValidationError, match=r"needs a package.*pip install 'wingbeat\[otel\]'"):
        AppConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
