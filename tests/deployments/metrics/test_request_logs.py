"""Request ids in log lines, and the optional access log with a line per request."""

import asyncio
import io
import logging
from dataclasses import replace

import pytest

from tests.deployments.http_world import FakePool
from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from wingbeat.deployments.api.endpoints.monitoring import AccessLog
from wingbeat.deployments.log import _FORMAT, RequestIdFilter
from wingbeat.deployments.metrics.monitor import Monitor
from wingbeat.deployments.request_context import RequestContext

ID = {"x-request-id": "mine-7"}


def monitor(**fields: object) -> Monitor:
    return replace(Engines(a=engine_stats()).monitor(), **fields)


def access_lines(caplog: pytest.LogCaptureFixture, **fields: object) -> list[str]:
    async def scenario() -> None:
        client = Client(monitor(**fields))
        await client.complete(ID)
        await client.get("/lost%0a%0dline", **ID)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    return [record.getMessage() for record in caplog.records if record.name == "wingbeat.access"]


def test_every_request_is_one_line_with_its_id(caplog):
    good, lost = access_lines(caplog, access_log=True)
    assert '"POST /v1/completions" 200 ' in good
    assert good.endswith(" ms mine-7")
    assert '"GET /lost%0A%0Dline" 404 ' in lost


def test_a_line_of_the_access_log_has_the_id_once(caplog):
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger("wingbeat.access").addHandler(handler)
    try:
        access_lines(caplog, access_log=True)
    finally:
        logging.getLogger("wingbeat.access").removeHandler(handler)
    assert written.getvalue().splitlines()[0].count("mine-7") == 1


def test_what_asks_over_and_over_is_logged_where_it_fails_alone(caplog):
    async def scenario() -> None:
        client = Client(monitor(access_log=True))
        for path in ("/health", "/metrics", "/ping", "/v1/models"):
            await client.get(path)
        await client.get("/health/none")

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    lines = [record.getMessage() for record in caplog.records if record.name == "wingbeat.access"]
    assert ['"GET /v1/models" 200' in lines[0], '"GET /health/none" 404' in lines[1]] == [True, True]
    assert len(lines) == 2


@pytest.mark.parametrize(("path", "status", "logged"), [("/load", 200, False), ("/load", 503, True), ("/x", 200, True)])
def test_polls_that_succeed_are_no_lines(path: str, status: int, logged: bool, caplog):
    scope = {"method": "GET", "path": f"/app{path}", "root_path": "/app"}
    with caplog.at_level(logging.INFO):
        AccessLog().ended(scope, RequestContext("id", status=status))
    assert bool(caplog.records) == logged


def test_nothing_is_logged_unless_asked_for(caplog):
    assert access_lines(caplog) == []


def test_lines_written_for_a_request_carry_its_id(caplog):
    pool = FakePool()
    pool.fail_after = (0, RuntimeError("broken by the test"))
    caplog.handler.addFilter(RequestIdFilter())
    asyncio.run(Client(monitor(), pool).complete(ID))
    logging.getLogger("wingbeat").warning("of no request")
    marks = {record.getMessage(): record.request for record in caplog.records if record.name.startswith("wingbeat")}
    assert marks["Request mine-7 failed."] == " [request mine-7]"
    assert marks["of no request"] == ""
