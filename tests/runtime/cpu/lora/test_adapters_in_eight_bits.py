"""LoRA adapters on top of weights that are rounded to eight bits."""

import pytest

from tests.runtime.cpu.layers.test_eight_bits import LENGTH, by_hand
from tests.runtime.lora_world import merge, write_adapter
from tests.runtime.models import (
    CHAIN,
    PROMPT_LENS,
    Run,
    eagle_drafter,
    engine_config,
    greedy,
    greedy_params,
    new_engine,
    random_model,
    random_prompts,
)
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
@pytest.mark.slow
def test_adapters_lie_on_top_of_rounded_weights(tmp_path):
    model, prompts = random_model("llama"), random_prompts(PROMPT_LENS)
    base = by_hand(model)
    folder = write_adapter(tmp_path / "a", model)
    expected = [greedy(base, prompts, LENGTH)[0], greedy(merge(base, folder), prompts, LENGTH)[0]]
    loaded = prepare_model(model, "llama", eight_bits=True)
    loaded.add(ModelAdapters(loaded.model, loaded.decoder_layers, 2, 8))
    names = [None, loaded.parts["adapters"].inspect("a", folder)]
    engine = new_engine(loaded, engine_config(CHAIN, max_loras=2, max_lora_rank=8), eagle_drafter(loaded, CHAIN))
    run = Run(engine, [], [])
    run.tokens = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        params = greedy_params(LENGTH)
        engine.add_request(Request(str(index), tuple(prompt), params, variant=names[index % 2]))
    try:
        assert run.finish() == [expected[index % 2][index] for index in range(len(prompts))]
    finally:
        engine.model.remove_taps()
