"""`GET /trace`: recordings of every engine as Chrome's JSON, for operators alone."""

import asyncio
import json
from functools import partial

import httpx
import pytest
from pydantic import SecretStr

from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.round_traces.routes import Record, add_trace_route

KEY, OPERATOR = SecretStr("key"), SecretStr("operator")


async def at_once(engine_id: str, seconds: float) -> list[tuple]:
    """Events of an engine."""
    return [
        ("schedule", 100.0, 0.001, None, "phases"),
        ("round", 100.0, 0.004, {"decodes": 2, "seconds": seconds, "requests": ["r:1"]}, "rounds"),
        ("levels", 100.001, 0.002, {"requests": ["r:1"]}, "drafter"),
    ]


def client_of(access: Access | None = None, record: Record = at_once) -> Client:
    engines = Engines(b=engine_stats(), a=engine_stats())
    add_route = partial(add_trace_route, engine_ids=engines.ids, record=record)
    return Client(engines.monitor(), access=access, more_routes=[add_route])


def traced(path: str = "/trace?seconds=0.5", access: Access | None = None, **headers: str) -> httpx.Response:
    return asyncio.run(client_of(access).get(path, **headers))


def test_every_engine_is_a_process():
    events = json.loads(traced().text)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "engine a", 1: "engine b"}
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("schedule", 100e6, 1000),
        ("round", 100e6, 4000),
        ("levels", 100.001e6, 2000),
    ]
    assert spans[1]["args"] == {"decodes": 2, "seconds": 0.5, "requests": ["r:1"]}
    assert spans[2]["args"] == {"requests": ["r:1"]}
    assert len({span["tid"] for span in spans}) == 3


def test_an_engine_that_hands_over_nothing_is_named():
    async def record(engine_id: str, seconds: float) -> list[tuple]:
        if engine_id == "b":
            raise ConnectionError("killed by the test")
        return await at_once(engine_id, seconds)

    got = json.loads(asyncio.run(client_of(record=record).get("/trace")).text)
    assert got["otherData"] == {"silent": ["b"]}
    assert {event["pid"] for event in got["traceEvents"] if event["ph"] == "X"} == {0}


@pytest.mark.parametrize("seconds", ["0", "-1", "31", "nan", "inf", "soon", ""])
def test_the_time_is_bounded(seconds):
    response = traced(f"/trace?seconds={seconds}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "seconds")


def of_server(host: str = "127.0.0.1", **keys: list[SecretStr]) -> Access:
    return Access.of_server(host, allowed_hosts=["*"], **keys)


@pytest.mark.parametrize(
    ("access", "key", "status"),
    [
        (of_server(), None, 200),
        (of_server(host="0.0.0.0"), None, 403),
        (of_server(api_keys=[KEY]), "key", 403),
        (of_server(api_keys=[KEY], operator_keys=[OPERATOR]), "key", 401),
        (of_server(api_keys=[KEY], operator_keys=[OPERATOR]), "operator", 200),
        (of_server(operator_keys=[OPERATOR]), None, 401),
        (of_server(host="0.0.0.0", operator_keys=[OPERATOR]), "operator", 200),
    ],
)
def test_only_operators_may_look(access, key, status):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    assert traced(access=access, **headers).status_code == status


def test_an_operator_key_is_no_api_key():
    access = of_server(api_keys=[KEY], operator_keys=[OPERATOR])
    got = [
        asyncio.run(client_of(access).get("/v1/models", authorization=f"Bearer {key}")).status_code
        for key in ("key", "operator")
    ]
    assert got == [200, 401]
