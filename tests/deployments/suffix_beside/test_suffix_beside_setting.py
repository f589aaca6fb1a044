"""The setting reaches the engine, by TensorRT-LLM's word too, and is refused where nothing is beside a text."""

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.vllm_words.speculative_config import PLACE, SPECULATIVE


def test_an_engine_is_told():
    assert AppConfig(suffix_beside=True).engine_config().suffix_beside
    assert not AppConfig().engine_config().suffix_beside


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "none"])
def test_a_drafter_that_copies_or_none_is_refused(drafter):
    with pytest.raises(ValueError, match=f"suffix_beside is True and drafter is {drafter}: "):
        AppConfig(suffix_beside=True, drafter=drafter)


@pytest.mark.parametrize(("value", "beside"), [({}, True), ({"threshold": 4}, True), (True, True), (False, False)])
def test_the_word_of_tensorrt_llm_stands_for_it(value, beside):
    row = SPECULATIVE[f"{PLACE}.sa_config"]
    assert row.read("sa_config", value, {}) == {"suffix_beside": beside}


def test_another_value_is_refused():
    with pytest.raises(ValueError, match="must be an object"):
        SPECULATIVE[f"{PLACE}.sa_config"].read("sa_config", "yes", {})
