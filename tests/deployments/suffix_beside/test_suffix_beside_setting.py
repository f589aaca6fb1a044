"""The setting reaches the engine, is on by default for one model, and is refused where nothing is beside a text."""

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.suffix_beside import part


def test_an_engine_is_told():
    assert AppConfig(suffix_beside=True).engine_config().suffix_beside
    assert not AppConfig().engine_config().suffix_beside


@pytest.mark.parametrize(
    ("given", "is_on"),
    [({}, True), ({"suffix_beside": False}, False), ({"drafter": "ngram"}, False), ({"device": "cuda"}, False)],
)
def test_a_named_model_that_gains_has_it_by_default(given, is_on, monkeypatch):
    asked = []
    monkeypatch.setattr(part, "first_result", lambda *words: asked.append(words) or True)
    assert AppConfig(**given).engine_config().suffix_beside is is_on
    assert all(words == ("gains_by_suffix", None) for words in asked)


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "none"])
def test_a_drafter_that_copies_or_none_is_refused(drafter):
    with pytest.raises(ValueError, match=f"suffix_beside is True and drafter is {drafter}: "):
        AppConfig(suffix_beside=True, drafter=drafter)
