"""Weights that are written under captured rounds of the GPU of numbers: the same graphs write by the new ones."""

import copy
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from tests.gpu_of_numbers import graphs
from tests.gpu_of_numbers.device import CUDA
from tests.gpu_of_numbers.engine_cases import PROMPTS, SHAPE, params
from tests.gpu_of_numbers.graphs import NumberGraph, StaleAddressError
from tests.runtime.models import Run, engine_config, generate, noisy
from tests.runtime.rollouts.host_driver import HostDriver
from tests.runtime.rollouts.test_served_weights import moved, values_of
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.rollouts.rollout_engine import RolloutEngine
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.rollouts.device_memory import move
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


def is_missing(driver: HostDriver, graph: NumberGraph) -> None:
    """Raise as a card does whose kernels touch an address without memory behind it."""
    gone = next((one.user for one in graph.outside if driver.is_missing(one.address)), None)
    if gone is not None:
        raise StaleAddressError(f"{gone} is given memory that was given back")


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_graphs_of_before_a_sleep_run_after_it(gpu, monkeypatch, tmp_path, name, level):
    model = noisy(name, num_hidden_layers=2, **KINDS[name])
    new = moved(model)
    by_old, by_new = (
        generate(prepare_model(copy.deepcopy(one), "fresh"), engine_config(SHAPE), None, PROMPTS, params(False))[0]
        for one in (model, new)
    )
    driver, loaded = HostDriver(), prepare_model(model.to(CUDA), name)
    monkeypatch.setattr(graphs, "BEFORE_REPLAY", [partial(is_missing, driver)])
    before = torch.cuda.memory_allocated()
    move(loaded, driver=driver)
    left = before - torch.cuda.memory_allocated()
    limits = engine_config(SHAPE, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=8, num_kv_blocks=16)
    held = RolloutEngine(Engine(loaded, limits, DrafterNeeds()))
    assert left >= sum(one.untyped_storage().nbytes() for one in held._update.weights.storages())
    assert Run(held, PROMPTS, params(False)).finish() == by_old
    graphs_of, awake = held.inner.runner.graphs, driver.physical_bytes
    num_captured = len(graphs_of.stats.captured)
    held.sleep(level)
    assert (driver.physical_bytes, held.is_sleeping()) == (0, True)
    passes = [graph for graph in gpu.graphs if any(driver.is_missing(one.address) for one in graph.outside)]
    assert len(passes) > 1
    for graph in passes:
        with pytest.raises(StaleAddressError, match="memory that was given back"):
            graph.replay()
    del driver.calls[:]
    held.wake_up(["weights"])
    assert set(driver.calls) == {"create", "map"}
    assert 0 < driver.physical_bytes < awake
    if level == 2:
        save_file(values_of(new), tmp_path / "new.safetensors")
        held.start_update()
        assert held.update_weights({"files": [str(tmp_path / "new.safetensors")]}).result(60).refused is None
        held.finish_update()
    held.wake_up(["kv_cache"])
    assert driver.physical_bytes == awake
    assert Run(held, PROMPTS, params(False)).finish() == (by_new if level == 2 else by_old)
    stats = graphs_of.stats
    assert (stats.failed, dict(stats.eager_runs), len(stats.captured)) == ([], {}, num_captured)
    assert stats.replays[Stage.BASE_DECODING]
    held.inner.model.remove_taps()
