"""The setting `learn` with others, replaced weights, and metrics of the decisions."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.runtime.pushed_folder import pushed_folder
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.learning.families import learning_families
from wingbeat.deployments.learning.folder import learning_root
from wingbeat.deployments.learning.part import refuses_weights
from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
from wingbeat.runtime.config import BENCHMARK_VARIABLE


def test_a_learner_refuses_other_weights_and_followers_do_not():
    assert "learn trains the head" in refuses_weights(AppConfig(learn=True))
    assert refuses_weights(AppConfig(learn={"trains": False})) is None


def test_other_weights_of_the_verifier_keep_the_versions_of_the_head(tmp_path: Path):
    follows = AppConfig(learn={"trains": False})
    assert learning_root(follows.with_weights(pushed_folder(tmp_path / "pushed"))) == learning_root(follows)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"drafter": "none"}, "there is no head to train"),
        ({"drafter": "ngram"}, "EAGLE and one-pass heads learn|earlier text has no head to train"),
        ({"recording_dir": "{folder}"}, "learn and recording_dir are both given"),
        ({"forced_acceptance": 0.8}, "learn and forced_acceptance are both given"),
        ({"drafter_factory": "module:worker"}, "its worker has no head"),
        ({"engine_factory": "module:engine"}, "that engine does not expose its rounds"),
        ({"learn": {"dir": __file__}}, "must be a directory"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_what_does_not_go_with_a_learner_is_refused(settings, said, tmp_path, monkeypatch):
    monkeypatch.setenv(BENCHMARK_VARIABLE, "1")
    given = {name: str(tmp_path) if value == "{folder}" else value for name, value in settings.items()}
    with pytest.raises(ValidationError, match=said):
        AppConfig(**{"learn": True} | given)


def test_decisions_and_the_learner_are_among_the_metrics():
    heads = {"decisions": {"promoted": 1}, "learner": {"seconds": 2.0, "samples": 3, "bytes": 4}}
    found = {
        sample.name: sample.value
        for family in learning_families(FleetSnapshot("demo", {"e": {"heads": heads}}))
        for sample in family.samples
    }
    assert found == {
        "wingbeat_head_decisions_total": 1,
        "wingbeat_learner_seconds_total": 2.0,
        "wingbeat_learner_samples": 3,
        "wingbeat_learner_bytes": 4,
    }
    assert not [sample for family in learning_families(FleetSnapshot("demo", {"e": {}})) for sample in family.samples]
