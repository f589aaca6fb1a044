"""Measured acceptance rolls a version back for the whole fleet, and chance does not."""

import asyncio
import json

import pytest

from tests.runtime.learning.test_head_versions import added, of_length
from wingbeat.deployments.learning.judge import HeadJudge
from wingbeat.deployments.replica.engine.engine_calls import EngineFigures
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.runtime.learning.head_counts import COUNTS_FILE
from wingbeat.runtime.learning.head_versions import COPY_FILE, FIGURES_FILE, LEARNER, LEDGER_FILE, HeadLedger


@pytest.fixture
def ledger(tmp_path):
    made = HeadLedger(tmp_path / "ledger", tmp_path, "model")
    added(made)
    made.promote(1, "better")
    return made


class Engines:
    """Engines of one replica, one after the other."""

    def __init__(self, ledger):
        self._figures = EngineFigures({"by_head": {}}, "attached", None, 1)
        self.judge = HeadJudge(ledger, self._now)

    async def _now(self):
        return self._figures

    def look(self, pid=1, weights="", **by_head):
        """Let the judge look at an engine's counts by head; `v1` are those of version 1."""
        counted = {int(name[1:]): counts for name, counts in by_head.items()}
        self._figures = EngineFigures({"by_head": counted}, "attached", None, pid, weights)
        asyncio.run(self.judge.look())


def looked(ledger, **by_head):
    engines = Engines(ledger)
    engines.look(**by_head)
    return engines.judge


def test_a_version_that_is_measurably_worse_is_rolled_back_and_the_reason_is_kept(ledger):
    looked(ledger, v0=of_length(3.0, 5000), v1=of_length(2.0, 600))
    found = ledger.read()
    assert (found.served, found.version(1).state) == (0, "rolled_back")
    assert "2.000 tokens per round over 600 rounds, 3.000 before it" in found.version(1).reason


@pytest.mark.parametrize(
    "counts",
    [
        {"v0": of_length(3.0, 5000), "v1": of_length(2.95, 600)},
        {"v0": of_length(3.0, 5000), "v1": of_length(1.0, 100)},
        {"v1": of_length(1.0, 5000)},
        {"v0": of_length(3.0, 5000), "v1": of_length(2.0, 30_000)},
    ],
    ids=["within chance", "too few rounds", "nothing before it", "long settled"],
)
def test_otherwise_it_stays(ledger, counts):
    looked(ledger, **counts)
    assert ledger.read().served == 1


def test_what_was_accepted_by_other_weights_of_the_verifier_is_held_against_no_version(ledger):
    engines = Engines(ledger)
    engines.look(pid=1, v0=of_length(3.0, 5000))
    # The verifier is another one, whom both heads know less well.
    engines.look(pid=2, weights="d1", v1=of_length(2.0, 600))
    assert ledger.read().served == 1
    engines.look(pid=2, weights="d1", v0=of_length(2.6, 600), v1=of_length(2.0, 1200))
    assert ledger.read().served == 0


def test_an_engine_that_is_gone_is_asked_again_and_another_engines_roll_back_counts_once(ledger):
    async def fails():
        raise EngineFailed("its process is gone")

    with pytest.raises(EngineFailed):
        asyncio.run(HeadJudge(ledger, fails).look())
    counts = {"v0": of_length(3.0, 5000), "v1": of_length(2.0, 600)}
    looked(ledger, **counts)
    looked(ledger, **counts)
    assert ledger.read().counts == {"promoted": 1, "rolled_back": 1}


def test_decisions_and_the_learner_are_told_for_metrics(ledger):
    (ledger.folder / LEARNER).mkdir()
    (ledger.folder / LEARNER / FIGURES_FILE).write_text(json.dumps({"samples": 3}))
    said = looked(ledger, v0=of_length(3.0, 500)).said
    assert said == {
        "decisions": {"promoted": 1, "rejected": 0, "rolled_back": 0, "refused": 0},
        "learner": {"samples": 3},
    }


def test_counts_of_an_engine_and_of_a_replica_that_ended_are_kept(ledger):
    engines = Engines(ledger)
    engines.look(pid=1, v0=of_length(3.0, 4000))
    engines.look(pid=1, v0=of_length(3.0, 5000), v1=of_length(2.0, 100))
    engines.look(pid=2, v1=of_length(2.0, 100))
    assert ledger.read().served == 1  # after 200 rounds
    Engines(ledger).look(pid=3, v1=of_length(2.0, 100))
    found = ledger.read()
    assert (found.served, found.version(1).state) == (0, "rolled_back")
    assert "over 300 rounds, 3.000 before it" in found.version(1).reason


def test_counts_of_all_engines_add_up_and_each_round_counts_once(ledger):
    first, second = Engines(ledger), Engines(ledger)
    for _ in range(5):
        first.look(v0=of_length(3.0, 5000), v1=of_length(2.0, 120))
        second.look(v1=of_length(2.0, 120))
    assert ledger.read().served == 1  # after 240 rounds
    second.look(v1=of_length(2.0, 140))
    assert ledger.read().served == 0


def test_a_version_that_is_promoted_again_is_judged_by_what_it_does_from_then_on(ledger):
    engines = Engines(ledger)
    engines.look(v0=of_length(3.0, 5000), v1=of_length(2.0, 600))
    ledger.promote(1, "by hand")
    engines.look(v0=of_length(3.0, 5000), v1=of_length(2.0, 600))
    assert ledger.read().served == 1
    engines.look(v0=of_length(3.0, 5000), v1=of_length(2.0, 900))
    assert ledger.read().served == 0


def test_what_was_measured_of_a_version_outlives_a_push_that_is_refused(ledger):
    engines = Engines(ledger)
    engines.look(v0=of_length(3.0, 5000), v1=of_length(2.0, 200))
    pushed = added(ledger, "noise", "operator", serve=True)
    engines.look(v0=of_length(3.0, 5000), v1=of_length(2.0, 210))
    ledger.refuse(pushed, "no head")
    engines.look(v0=of_length(3.0, 5000), v1=of_length(2.0, 260))
    found = ledger.read()
    assert (found.served, found.version(1).state) == (0, "rolled_back")
    assert "over 260 rounds" in found.version(1).reason


def test_the_configured_head_that_was_promoted_by_hand_is_rolled_back_too(ledger):
    engines = Engines(ledger)
    engines.look(v0=of_length(2.0, 500), v1=of_length(3.0, 5000))
    ledger.promote(0, "by hand")
    engines.look(v0=of_length(2.0, 500 + 200), v1=of_length(3.0, 5000))
    assert ledger.read().served == 0, "of what it did before its promotion nothing counts"
    engines.look(v0=of_length(2.0, 500 + 300), v1=of_length(3.0, 5000))
    assert (ledger.read().served, ledger.read().decisions[-1].what) == (1, "rolled_back")


def test_a_ledger_that_cannot_be_read_is_logged_once(ledger, caplog):
    engines = Engines(ledger)
    texts = {name: (ledger.folder / name).read_text() for name in (LEDGER_FILE, COPY_FILE)}
    for name in texts:
        (ledger.folder / name).write_text("{")
    for _ in range(3):
        engines.look()
    assert caplog.text.count("wingbeat drafter repair") == 1
    (ledger.folder / LEDGER_FILE).write_text(texts[LEDGER_FILE])
    engines.look(v0=of_length(3.0, 5000), v1=of_length(2.0, 600))
    assert ledger.read().served == 0


def test_a_file_of_counts_that_is_none_counts_for_nothing(ledger):
    (ledger.folder / COUNTS_FILE).write_text("cut sh")
    looked(ledger, v0=of_length(3.0, 5000), v1=of_length(2.0, 600))
    assert ledger.read().served == 0
