"""`/v1/weights`: every client sees the served weights; only operators push."""

import pytest
from pydantic import SecretStr

from tests.deployments.http_world import FakePool, call
from tests.deployments.weights.test_push import Replicas
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.fleet.every_engine import EveryEngine
from wingbeat.deployments.weights.push import Refusal, Weights

PATH, UPDATE = "/v1/weights", "/v1/weights/update"


class Cards(Replicas):
    """Replicas that report the fields of a model card."""

    async def call(self, engine_id, name, **asked):
        if asked["operation"] == "weights":
            served = self.served[engine_id]
            return {"weights": served.digest or None, "folder": served.folder, "pushed_at": None, "state": "serves"}
        return await super().call(engine_id, name, **asked)


@pytest.fixture
def replicas() -> Cards:
    return Cards("a", "b")


@pytest.fixture
def pool(replicas: Cards) -> FakePool:
    made = FakePool()
    made.every_engine = EveryEngine(replicas.call, lambda: list(replicas.answers))
    made.engine_ids = replicas.answers.keys()
    return made


def push(pool: FakePool, folder="/step-1", **more):
    return call(pool, UPDATE, {"folder": folder, **more})


def test_what_was_pushed_is_shown_with_every_engine_and_null_where_they_differ(pool, replicas):
    before = call(pool, PATH, method="GET").json()
    assert before["data"][0] | {"engines": None} == {
        "object": "weights", "model": "demo", "weights": None, "folder": "", "engines": None
    }  # fmt: skip
    found = push(pool, drain_s=5).json()
    assert (found["weights"], found["folder"], sorted(found["engines"])) == ("d1", "/step-1", ["a", "b"])
    replicas.served["b"] = Weights("d2", "/step-2")
    (card,) = call(pool, PATH, method="GET").json()["data"]
    assert (card["weights"], card["folder"], card["engines"]["b"]["weights"]) == (None, None, "d2")


def test_what_cannot_be_served_is_400_and_what_goes_on_meanwhile_409(pool, replicas):
    replicas.answers["a"] = Refusal(
        "no engine starts with it: NaN; the former checkpoint is served again", is_of_folder=True
    )
    answer = push(pool)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "folder")
    message = answer.json()["error"]["message"]
    assert "cannot be served: no engine starts with it: NaN; the former checkpoint is" in message
    replicas.answers["a"] = Refusal("3 requests have not ended within 5 s")
    error = (answer := push(pool)).json()["error"]
    assert (answer.status_code, error["code"]) == (409, "weights_not_replaced")
    assert "3 requests have not ended within 5 s" in error["message"]
    replicas.answers.clear()
    assert push(pool).status_code == 503


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "folder"),
        ({"folder": ""}, "folder"),
        ({"folder": 3}, "folder"),
        ({"folder": "/x", "drain_s": -1}, "drain_s"),
        ({"folder": "/x", "drain_s": 601}, "drain_s"),
        ({"folder": "/x", "drain": 1}, "drain"),
        ({"folder": "/x", "model": "other"}, "model"),
    ],
)
def test_fields_are_checked(pool, replicas, body, param):
    answer = call(pool, UPDATE, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404 if param == "model" else 400, param)
    assert replicas.digests() == ["", ""]


def test_operators_alone_push(pool, replicas):
    access = Access(operator_keys=(SecretStr("k"),))
    assert call(pool, UPDATE, {"folder": "/step-1"}, access=access).status_code == 401
    assert call(pool, PATH, method="GET", access=access).status_code == 200
    assert replicas.digests() == ["", ""]
