"""A verifier over two processes writes what it writes in one."""

import pytest

from tests.runtime.models import PROMPT_LENS, Run, engine_config, greedy, greedy_params, random_model, random_prompts
from tests.runtime.tensor_parallel.two_ranks import SecondRank, led_engine, led_model

LENGTH = 24
EVEN = {"vocab_size": 96}


@pytest.fixture(scope="module")
def second():
    rank = SecondRank()
    yield rank
    if rank.process.is_alive():
        rank.kill()


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_greedy_text_is_that_of_generate(name, second, tmp_path):
    model, prompts = random_model(name, **EVEN), random_prompts(PROMPT_LENS, 96)
    expected, gap = greedy(model, prompts, LENGTH)
    assert gap > 1e-4
    with led_model(second, model, tmp_path, engine_config()) as led:
        assert led.loaded.layers[0].num_kv_heads == 1
        assert Run(led_engine(led, led.limits), prompts, greedy_params(LENGTH)).finish() == expected
