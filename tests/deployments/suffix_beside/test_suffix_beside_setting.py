"""The setting reaches the engine, is on by default for one model, and is refused where nothing is beside a text."""

import pytest

from tests.needs import needs
from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.demo import DEMO_FOLDER


def test_an_engine_is_told():
    assert AppConfig(suffix_beside=True).engine_config().suffix_beside
    assert not AppConfig().engine_config().suffix_beside


@needs("named_models")
@pytest.mark.parametrize(
    ("given", "is_on"),
    [({}, True), ({"suffix_beside": False}, False), ({"drafter": "ngram"}, False), ({"device": "cuda"}, False)],
)
def test_the_named_model_that_gains_has_it_by_default(given, is_on, monkeypatch):
    from wingbeat.runtime.named_models import fetch

    monkeypatch.setattr(fetch, "fetched", lambda model: model.file)
    monkeypatch.setattr(fetch, "first_result", lambda hook, file: DEMO_FOLDER / "verifier")
    config = AppConfig(model="smollm2", **given)
    assert config.engine_config().suffix_beside is is_on


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "none"])
def test_a_drafter_that_copies_or_none_is_refused(drafter):
    with pytest.raises(ValueError, match=f"suffix_beside is True and drafter is {drafter}: "):
        AppConfig(suffix_beside=True, drafter=drafter)
