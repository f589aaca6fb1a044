"""Heads that change while streams run, and processes that are killed meanwhile: no text changes, nothing is lost,
and every process comes back with the version that is served."""

import itertools
import os
import shutil
import signal
import threading
from contextlib import contextmanager

import pytest

from tests.deployments.metrics.prometheus_server import BINARY
from tests.e2e.test_drafter_failure import PROBE, read_all
from tests.e2e.watched_app import watched
from tests.optional import kept
from tests.runtime.learning.test_head_swap import changed
from tests.runtime.models import DEMO_PAIR
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.learning.folder import ledger_of
from wingbeat.runtime.learning.head_counts import LEAST_ROUNDS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
PLACES = kept({"actor": {}, "engine": {"drafter_place": "engine"}, "pool": {"drafters": {"num": 1}}})
EVERY_S = 0.4


class Learning:
    """An application whose head may be replaced, and two versions of it: the demo's and one with noise in it."""

    def __init__(self, app, ledger, folder):
        self.app, self.ledger = app, ledger
        other = changed(DEMO_PAIR / "drafter", folder / "other")
        self.versions = [
            ledger.add(lambda into, source=source: shutil.copytree(source, into, dirs_exist_ok=True), "operator", "")
            for source in (other, DEMO_PAIR / "drafter")
        ]
        self._turns = itertools.cycle(self.versions)

    def swap(self):
        """Serve the other version; whether or not anybody follows."""
        self.ledger.promote(next(self._turns), "in turn")

    @contextmanager
    def swapping(self):
        """Swap for ever while the block lasts."""
        done = threading.Event()

        def run():
            while not done.wait(EVERY_S):
                self.swap()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def drafts_with_served(self):
        """Whether a request that is drafted for now is drafted for by the version that is served."""
        self.app.complete(PROBE)
        return self.app.engine()["head_version"] == self.ledger.read().served


@contextmanager
def learning(start_app, name, folder, **settings):
    fields = {"learn": {"dir": folder / "learning", "trains": False}, "adaptive": False, "drafter_timeout_s": 2.0}
    fields |= settings
    with start_app(name, **fields) as app:
        yield Learning(app, ledger_of(AppConfig(**fields)), folder)


@pytest.mark.parametrize("place", PLACES)
def test_swaps_and_kills_amid_streams_change_no_text(place, demo_app, start_app, until, tmp_path):
    undisturbed = read_all(demo_app)
    with learning(start_app, f"learn-{place}", tmp_path, **PLACES[place]) as world:
        with world.swapping():
            assert read_all(world.app) == undisturbed
        until(world.drafts_with_served)
        versions = [version for version, counts in world.app.engine()["by_head"].items() if counts[0]]
        assert len(versions) > 1, "no version but one has drafted"
        for what in ("engine_pid",) if place == "engine" else ("drafter_pid", "engine_pid"):
            pid = world.app.engine()[what]

            def kill_in_a_swap(pid=pid):
                world.swap()
                os.kill(pid, signal.SIGKILL)

            assert read_all(world.app, kill_in_a_swap) == undisturbed
            until(lambda: world.app.engine()["drafter_state"] == "attached")
            until(world.drafts_with_served)
        assert world.ledger.read().version(world.ledger.read().served).state == "promoted"
        world.app.check_integrity()


def test_a_fleet_follows_replica_by_replica_and_refuses_what_is_broken(start_app, until, tmp_path):
    with learning(start_app, "learn-fleet", tmp_path, num_replicas=2) as world:
        world.swap()
        number = world.ledger.read().served

        def all_follow():
            # So many at once that both replicas have rounds: an idle one takes a version with its next round.
            read_all(world.app)
            return {stats["head_version"] for stats in world.app.engines().values()} == {number}

        until(all_follow)
        broken = tmp_path / "broken"
        shutil.copytree(world.ledger.folder_of(number), broken)
        (broken / "model.safetensors").write_bytes(b"cut short")
        bad = world.ledger.add(lambda into: shutil.copytree(broken, into, dirs_exist_ok=True), "operator", "")
        answer = world.app.http.post("/v1/drafter/promote", json={"version": bad})
        assert answer.status_code == 400
        assert "cannot be served" in answer.json()["error"]["message"]
        shown = world.app.http.get("/v1/drafter").json()
        assert (shown["served"], shown["counts"]["refused"]) == (number, 1)
        assert all_follow()


def test_a_learner_stores_what_it_may_and_another_one_follows_it_when_it_is_killed(start_app, until, tmp_path):
    with learning(start_app, "learn-learner", tmp_path, learn={"dir": tmp_path / "learning"}) as world:
        world.app.complete(PROBE, extra={"speculation": {"learn": False}})
        until(lambda: world.app.engine()["learner_pid"])
        first = world.app.engine()["learner_pid"]
        os.kill(first, signal.SIGKILL)
        until(lambda: world.app.engine()["learner_pid"] not in (0, first))
        world.app.complete("import os", max_tokens=64)
        until(lambda: list((world.ledger.folder / "rounds").glob("*/*/shard-*.safetensors")))
        until(lambda: (world.app.http.get("/v1/drafter").json()["learner"] or {}).get("bytes"))
        assert world.app.engine()["recording"]["num_sequences"] == 1


@pytest.mark.skipif(BINARY is None, reason="prometheus is not installed: apt-get install prometheus")
def test_a_version_that_drafts_worse_is_rolled_back_and_fires_its_alert(start_app, tmp_path):
    settings = {"learn": {"dir": tmp_path / "learning", "trains": False}, "adaptive": False}
    ledger = ledger_of(AppConfig(**settings))
    with watched(start_app, "alerts-learn", tmp_path, {"max_tokens": 64}, **settings) as world:
        world.ask(3)
        world.until(lambda: world.app.engine()["by_head"].get(0, (0,))[0] >= LEAST_ROUNDS)
        source = changed(DEMO_PAIR / "drafter", tmp_path / "worse")
        worse = ledger.add(lambda into: shutil.copytree(source, into, dirs_exist_ok=True), "operator", "")
        assert "WingbeatHeadRolledBack" not in world.fired()
        ledger.promote(worse, "to see it rolled back")
        world.wait_for("WingbeatHeadRolledBack")
        assert ledger.read().served == 0
        assert world.num_errors == 0
