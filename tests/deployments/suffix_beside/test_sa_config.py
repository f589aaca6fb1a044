"""TensorRT-LLM's word stands for the setting."""

import pytest

from wingbeat.deployments.vllm_words.speculative_config import PLACE, SPECULATIVE


@pytest.mark.parametrize(("value", "beside"), [({}, True), ({"threshold": 4}, True), (True, True), (False, False)])
def test_the_word_of_tensorrt_llm_stands_for_it(value, beside):
    row = SPECULATIVE[f"{PLACE}.sa_config"]
    assert row.read(value, {}) == {"suffix_beside": beside}


def test_another_value_is_refused():
    with pytest.raises(ValueError, match="must be an object"):
        SPECULATIVE[f"{PLACE}.sa_config"].read("yes", {})
