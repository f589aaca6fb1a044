"""LoRA adapters beside rounded activations: an adapter reads the activations unrounded."""

import pytest

from tests.runtime.lora_world import write_adapter
from tests.runtime.models import (
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy_params,
    new_engine,
    random_model,
    random_prompts,
)
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.activations.part import extend_model
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
def test_text_is_the_same_whatever_is_drafted_and_beside_it(tmp_path):
    model, prompts = random_model("llama"), random_prompts((5, 23, 40, 17))
    folder = write_adapter(tmp_path / "a", model)
    loaded = prepare_model(model, "llama", eight_bits=True)
    extend_model(loaded, EngineConfig(cpu_activations="int8"))
    loaded.add(ModelAdapters(loaded.model, loaded.decoder_layers, 2, 8))
    adapter = loaded.parts["adapters"].inspect("a", folder)

    def texts(drafts, chosen):
        drafter = eagle_drafter(loaded, TREE) if drafts else None
        run = Run(new_engine(loaded, engine_config(TREE, max_loras=2, max_lora_rank=8), drafter), [], [])
        run.tokens = [[] for _ in chosen]
        for place, (index, variant) in enumerate(chosen):
            run.engine.add_request(Request(str(place), tuple(prompts[index]), greedy_params(24), variant=variant))
        try:
            return run.finish()
        finally:
            run.engine.model.remove_taps()

    mixed = [(index, adapter if index % 2 else None) for index in range(4)]
    plain = texts(False, mixed)
    assert texts(True, mixed) == plain
    assert [texts(False, [one])[0] for one in mixed] == plain
    assert texts(False, [(index, None) for index in range(4)])[1] != plain[1]
