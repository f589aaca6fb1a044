"""The setting reaches the engine, and is refused where nothing is beside a text."""

import pytest

from wingbeat.deployments.app_config import AppConfig


def test_an_engine_is_told():
    assert AppConfig(suffix_beside=True).engine_config().suffix_beside
    assert not AppConfig().engine_config().suffix_beside


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "none"])
def test_a_drafter_that_copies_or_none_is_refused(drafter):
    with pytest.raises(ValueError, match=f"suffix_beside is True and drafter is {drafter}: "):
        AppConfig(suffix_beside=True, drafter=drafter)
