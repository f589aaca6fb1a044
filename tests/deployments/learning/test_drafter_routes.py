"""`/v1/drafter`: every client may see the serving head and its reasons; only operators may change it."""

import threading
from functools import partial

import pytest
from pydantic import SecretStr

from tests.deployments.http_world import FakePool, call
from tests.runtime.learning.test_head_versions import added, of_length
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.learning import routes as drafter_routes
from wingbeat.deployments.learning.routes import INCOMING, HeadVersions, add_drafter_routes
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.runtime.learning.head_versions import COPY_FILE, LEDGER_FILE, HeadLedger

PATH = "/v1/drafter"


class Fleet:
    """Three engines' figures."""

    async def snapshot(self):
        old, new = of_length(3.0, 600), of_length(3.5, 400)
        engines = {
            "a": {
                "head_version": 1,
                "by_head": {0: old, 1: new},
                "recording": {"stopped": "OSError: no space"},
            },
            "b": {"head_version": 0, "by_head": {0: old}},
            "c": {"head_version": 1, "by_head": {}},
        }
        return FleetSnapshot("demo", engines)


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    monkeypatch.setattr(drafter_routes, "TOLD_S", 5.0)
    monkeypatch.setattr(drafter_routes, "LOOK_S", 0.01)
    made = HeadLedger(tmp_path / "ledger", tmp_path / "configured", "model")
    added(made)
    return made


def asked(ledger, path=PATH, body=None, method="GET", **app):
    return call(
        FakePool(),
        path,
        body,
        method=method,
        more_routes=[partial(add_drafter_routes, heads=HeadVersions(ledger, Fleet()))],
        **app,
    )


def posted(ledger, what, **body):
    return asked(ledger, f"{PATH}/{what}", body, "POST")


def drafter_says(ledger, number, reason=None):
    """Start a fake drafter that takes a version once it is to be served, or refuses it with `reason`."""

    def follow():
        while ledger.read().served != number:
            pass
        ledger.took(number) if reason is None else ledger.refuse(number, reason)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread


def test_versions_are_shown_with_acceptance_over_all_engines_and_its_interval(ledger):
    found = asked(ledger).json()
    assert (found["object"], found["served"], found["engines"]) == ("drafter", 0, {"a": 1, "b": 0, "c": 1})
    assert found["recording"]["a"]["stopped"] == "OSError: no space"
    first, second = found["versions"]
    assert (first["state"], second["state"], found["learner"]) == ("configured", "waiting", None)
    seen = first["acceptance"]
    assert (seen["length"], seen["rounds"]) == (3.0, 1200)
    assert seen["low"] < 3.0 < seen["high"]
    assert second["acceptance"]["length"] == 3.5
    assert "folder" not in first


def test_a_version_is_promoted_and_rolled_back(ledger):
    drafter_says(ledger, 1)
    found = posted(ledger, "promote", version=1, reason="Tuesday's").json()
    assert (found["served"], found["last_decision"]["reason"]) == (1, "Tuesday's")
    found = posted(ledger, "rollback").json()
    assert (found["served"], found["versions"][1]["state"]) == (0, "rolled_back")
    again = posted(ledger, "rollback")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "head_version")


def test_a_folder_is_added_and_one_that_drafters_refuse_is_an_error_that_says_why(ledger):
    folder = ledger.folder / INCOMING / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    drafter_says(ledger, 2, "its numbers are not finite")
    answer = posted(ledger, "promote", folder="mine")
    assert answer.status_code == 400
    assert "its numbers are not finite" in answer.json()["error"]["message"]
    assert ledger.read().served == 0
    assert ledger.read().version(2).source == "operator"


def test_a_ledger_that_cannot_be_read_is_repaired_with_the_version_that_drafters_have(ledger):
    assert "nothing to repair" in posted(ledger, "repair").json()["error"]["message"]
    for name in (LEDGER_FILE, COPY_FILE):
        (ledger.folder / name).write_text("{")
    told = asked(ledger)
    assert (told.status_code, "wingbeat drafter repair" in told.json()["error"]["message"]) == (409, True)
    found = posted(ledger, "repair").json()
    assert (found["served"], [version["number"] for version in found["versions"]]) == (1, [0, 1])


@pytest.mark.parametrize("folder", ["../../etc", "missing", "/etc", ".", "0" * 300, "a\0b", "circle"])
def test_folders_elsewhere_are_refused(ledger, folder):
    (ledger.folder / INCOMING).mkdir(parents=True)
    (ledger.folder / INCOMING / "circle").symlink_to("circle")
    answer = posted(ledger, "promote", folder=folder)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "folder")
    assert len(ledger.read().versions) == 2


def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(ledger, monkeypatch):
    folder = ledger.folder / INCOMING / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drafter_routes.shutil, "copyfile", full)
    error = posted(ledger, "promote", folder="mine").json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "head_version")
    assert "No space left" in error["message"]
    assert len(ledger.read().versions) == 2


@pytest.mark.parametrize(
    ("body", "param"), [({}, "version"), ({"version": 1, "folder": "x"}, "version"), ({"verifier": "x"}, "verifier")]
)
def test_what_is_asked_for_must_be_one_thing(ledger, body, param):
    answer = posted(ledger, "promote", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_version_that_is_not_there_is_named(ledger):
    answer = posted(ledger, "promote", version=9)
    assert answer.status_code == 409
    assert "no version 9" in answer.json()["error"]["message"]


def test_operators_alone_change_what_is_served(ledger):
    access = Access(operator_keys=(SecretStr("k"),))
    for what in ("promote", "rollback", "repair"):
        assert asked(ledger, f"{PATH}/{what}", {"version": 1}, "POST", access=access).status_code == 401
    assert asked(ledger, access=access).status_code == 200
    assert ledger.read().served == 0


def test_without_learning_there_is_no_such_endpoint():
    assert call(FakePool(), PATH, method="GET").status_code == 404


def test_the_page_is_told_where_the_versions_are(ledger):
    assert asked(ledger, "/", headers={"Accept": "application/json"}).json()["drafter"] == PATH
