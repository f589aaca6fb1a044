"""Ministral 3's attention as fused steps: queries are scaled by position, behind the sequences of the trial at load."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.runtime.models import SHAPE, Run, add_noise, engine_config, greedy, greedy_params, new_engine, random_prompts
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.fused.attention import LayerOps, ScaledHalf
from wingbeat.runtime.verifier.loading.loader import prepare_model


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model("ministral3", **SHAPE)
    scales = {"llama_4_scaling_beta": 2.0, "original_max_position_embeddings": 150}
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4} | scales
    return add_noise(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


@pytest.mark.parametrize("is_fused", [False, True], ids=["layers of this machine", "fused attention"])
def test_the_text_is_that_of_generate(monkeypatch, is_fused):
    """Layers of this machine are not those of Llama, though their code is."""
    try:
        new_model()
    except ValueError as error:
        pytest.skip(str(error))
    if is_fused:
        monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    prompts = random_prompts((160, 3, 20))
    expected = [greedy(new_model(), [prompt], 8)[0][0] for prompt in prompts]
    loaded = prepare_model(new_model(), "ministral3")
    halves = [getattr(layer.self_attn, "_half", None) for layer in loaded.decoder_layers]
    assert all(isinstance(half, ScaledHalf) == is_fused for half in halves)
    sequences = [prompt + more for prompt, more in zip(prompts, expected, strict=True)]
    drafter = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    engine = new_engine(loaded, engine_config(max_num_batched_tokens=64), drafter)
    for speculation in (True, False):
        assert Run(engine, prompts, greedy_params(8, speculation=speculation)).finish() == expected
