"""Attention over latents on the GPU of numbers: captured rounds write what transformers' generate() writes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from tests.gpu_of_numbers.device import CUDA
from tests.runtime.models import SHAPE, Run, add_noise, engine_config, greedy, greedy_params, random_prompts
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.latent_attention.part import extend_model
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.verifier.loading.loader import prepare_model

TREE = SpeculationConfig(draft_steps=1, draft_top_k=3, verify_tree_size=4)
LIMITS = {"max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 8, "num_kv_blocks": 24, "block_size": 4}
FIELDS = SHAPE | {"num_key_value_heads": SHAPE["num_attention_heads"], "num_hidden_layers": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = DeepseekV3Config(**FIELDS | LATENT, v_head_dim=16, first_k_dense_replace=2)
    return add_noise(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


@pytest.mark.parametrize("stored", ["heads", "latents"])
def test_captured_rounds_write_what_generate_writes(gpu, stored):
    """Prompts in chunks, trees, and plain rounds."""
    prompts = random_prompts((11, 3))
    expected, _ = greedy(new_model(), prompts, 6)
    loaded = prepare_model(new_model().to(CUDA), "deepseek_v3")
    if stored == "latents":
        extend_model(loaded, engine_config(TREE, **LIMITS))
    sequences = [prompt + more for prompt, more in zip(prompts, expected, strict=True)]
    drafter = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    engine = build_engine(loaded, engine_config(TREE, **LIMITS), drafter, InProcessChannel)
    for speculation in (True, False):
        assert Run(engine, prompts, greedy_params(6, speculation=speculation)).finish() == expected
    stats = engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.BASE_VERIFICATION]
    assert stats.replays[Stage.BASE_DECODING]
    assert gpu.launches["_keep_latents_kernel" if stored == "latents" else "_store_latents_kernel"] > 0
    assert engine.cache.block_bytes == 4 * 4 * sum(layer.kv_size for layer in loaded.layers)
