"""Weights that are written under captured rounds of the GPU of numbers: the same graphs write by the new ones."""

import copy
from functools import partial

import pytest

from tests.gpu_of_numbers.device import CUDA
from tests.gpu_of_numbers.engine_cases import PROMPTS, SHAPE, params
from tests.runtime.models import Run, engine_config, generate, noisy
from tests.runtime.rollouts.test_served_weights import moved, values_of
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.rollouts.rollout_engine import RolloutEngine
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.rollouts.update import WeightUpdate
from wingbeat.runtime.verifier.loading.loader import prepare_model

KINDS = {"llama": {}, "gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}


@pytest.mark.parametrize("name", KINDS)
def test_captured_rounds_write_by_what_was_written(gpu, name):
    model = noisy(name, num_hidden_layers=2, **KINDS[name])
    new = moved(model)
    values = values_of(new)
    fresh = prepare_model(copy.deepcopy(new), "fresh")
    expected = generate(fresh, engine_config(SHAPE), None, PROMPTS, params(False))[0]
    loaded = prepare_model(model.to(CUDA), name)
    limits = engine_config(SHAPE, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=8, num_kv_blocks=16)
    engine = build_engine(loaded, limits, None, partial(InProcessChannel, device=CUDA))
    held = RolloutEngine(engine)
    assert Run(held, PROMPTS, params(False)).finish() != expected
    num_captured = len(engine.runner.graphs.stats.captured)
    update: WeightUpdate = held._update
    update.start()
    update.write(values.items)
    update.finish()
    held._outputs += engine.recompute()
    assert Run(held, PROMPTS, params(False)).finish() == expected
    stats = engine.runner.graphs.stats
    assert (stats.failed, dict(stats.eager_runs), len(stats.captured)) == ([], {}, num_captured)
    assert stats.replays[Stage.BASE_DECODING]
    engine.model.remove_taps()
