"""Mixtures of experts on the GPU of numbers: captured rounds write what transformers' generate() writes."""

import pytest

from tests.gpu_of_numbers.device import CUDA
from tests.runtime.models import Run, engine_config, greedy, greedy_params, random_model, random_prompts
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.experts.forward import EXPERTS_NAME
from wingbeat.runtime.experts.routers import FusedRouter
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.verifier.loading.loader import prepare_model

SHAPE = SpeculationConfig(draft_steps=1, draft_top_k=3, verify_tree_size=4)
LIMITS = {"max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 8, "num_kv_blocks": 24, "block_size": 4}
PROMPTS = random_prompts((11, 3))
NUM_TOKENS = 6
FIELDS = {
    "qwen3_moe": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("name", FIELDS)
def test_captured_rounds_write_what_generate_writes(gpu, name):
    """Prompts in chunks, trees, and plain rounds."""
    expected, _ = greedy(random_model(name, **FIELDS[name]), PROMPTS, NUM_TOKENS)
    model = random_model(name, **FIELDS[name]).to(CUDA)
    model.set_experts_implementation("batched_mm")  # the device has no counts by torch.histc
    loaded = prepare_model(model, name)
    assert loaded.model.config._experts_implementation == EXPERTS_NAME
    assert sum(isinstance(module, FusedRouter) for module in loaded.model.modules()) == 2
    sequences = [prompt + more for prompt, more in zip(PROMPTS, expected, strict=True)]
    drafter = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    engine = build_engine(loaded, engine_config(SHAPE, **LIMITS), drafter, InProcessChannel)
    for speculation in (True, False):
        assert Run(engine, PROMPTS, greedy_params(NUM_TOKENS, speculation=speculation)).finish() == expected
    stats = engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.BASE_VERIFICATION]
    assert stats.replays[Stage.BASE_DECODING]
    assert engine.speculation.acceptance_length > 1.5
    for kernel in ("_choose_experts_kernel", "_route_experts_kernel", "_grouped_product_kernel", "_sum_experts_kernel"):
        assert gpu.launches[kernel] > 0
