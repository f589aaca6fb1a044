"""Weights that are written while two ranks serve them: each takes its part of what comes whole."""

import copy

import pytest

from tests.runtime.models import Run, engine_config, generate, greedy_params, noisy
from tests.runtime.rollouts.test_served_weights import moved, values_of
from tests.runtime.tensor_parallel.recorded_ranks import RecordedRank
from tests.runtime.tensor_parallel.test_ranks import EVEN, PROMPTS
from tests.runtime.tensor_parallel.two_ranks import led_engine, led_model
from wingbeat.runtime.rollouts.served_weights import ServedWeights, WeightsRefused
from wingbeat.runtime.verifier.loading.loader import prepare_model

LENGTH = 24


def written_by(model) -> list[list[int]]:
    return generate(prepare_model(model, "fresh"), engine_config(), None, PROMPTS, greedy_params(LENGTH))[0]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_both_ranks_write_by_what_was_written(name: str, tied: bool, second, tmp_path):
    model = noisy(name, **EVEN, tie_word_embeddings=tied)
    new = moved(model)
    values, expected = values_of(new), written_by(copy.deepcopy(new))
    with led_model(second, model, tmp_path, engine_config(), graph_device=RecordedRank()) as led:
        engine = led_engine(led, led.limits, None, RecordedRank())
        before = Run(engine, PROMPTS, greedy_params(LENGTH)).finish()
        served = ServedWeights(led.loaded)
        for one, value in values.items():
            served.check(one, tuple(value.shape), value.dtype)
            served.write(one, served.converted(one, value))
        served.finish()
        engine.recompute()
        assert Run(engine, PROMPTS, greedy_params(LENGTH)).finish() == expected != before
        assert served.checksums() == ServedWeights(prepare_model(new, "fresh")).checksums()
        with pytest.raises(WeightsRefused, match="has shape"):
            served.check("model.layers.0.mlp.up_proj.weight", (1, 1), value.dtype)
