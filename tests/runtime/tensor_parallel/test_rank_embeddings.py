"""Embeddings of a verifier that is divided."""

import pytest

from tests.runtime.models import engine_config, random_model, random_prompts
from tests.runtime.pooling.test_pooling import Embedder, asking, check
from tests.runtime.tensor_parallel.two_ranks import SecondRank, led_engine, led_model
from wingbeat.runtime.pooling.pooling import Pooling


@pytest.mark.slow
@pytest.mark.parametrize("pooling", list(Pooling))
def test_of_two_ranks_they_are_those_of_one(pooling, tmp_path):
    prompts, model, second = random_prompts((1, 23, 61), 96), random_model("llama", vocab_size=96), SecondRank()
    try:
        with led_model(second, model, tmp_path, engine_config(max_num_batched_tokens=16)) as led:
            run = Embedder(led_engine(led, led.limits), prompts, [asking(pooling)] * len(prompts))
            run.finish()
    finally:
        second.kill()
    check(random_model("llama", vocab_size=96), run, prompts, pooling)
