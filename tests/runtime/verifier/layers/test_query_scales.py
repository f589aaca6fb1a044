"""Llama 4's layers without RoPE scale queries by their position in the sequence, wherever in a batch their row is."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4TextConfig

from tests.runtime.models import SHAPE, Run, add_noise, engine_config, greedy, greedy_params, new_engine, random_prompts
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model

LAYERS = SHAPE["num_hidden_layers"]


def new_model(floor_scale: int) -> torch.nn.Module:
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "moe_layers": [1], "intermediate_size_mlp": 96}
    config = Llama4TextConfig(
        **SHAPE, **experts, no_rope_layers=[1, 0] * (LAYERS // 2), attention_chunk_size=512,
        floor_scale=floor_scale, attn_scale=2.0,
    )  # fmt: skip
    return add_noise(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def check_texts(floor_scale: int) -> LoadedModel:
    """Check the texts of trees and of plain rounds, of prompts longer than the trial at load."""
    prompts = random_prompts((160, 3, 20))
    # alone, because transformers counts padding before a prompt
    expected = [greedy(new_model(floor_scale), [prompt], 8)[0][0] for prompt in prompts]
    loaded = prepare_model(new_model(floor_scale), "llama4")
    sequences = [prompt + more for prompt, more in zip(prompts, expected, strict=True)]
    drafter = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    engine = new_engine(loaded, engine_config(max_num_batched_tokens=64), drafter)
    for speculation in (True, False):
        assert Run(engine, prompts, greedy_params(8, speculation=speculation)).finish() == expected
    return loaded


@pytest.mark.parametrize("floor_scale", [4, 150])
def test_the_text_is_that_of_generate(floor_scale):
    check_texts(floor_scale)
