"""Hybrids on the GPU of numbers: rounds that are captured write what the CPU's eager ones write."""

import pytest

from tests.gpu_of_numbers.device import CUDA
from tests.runtime.hybrids import random_hybrid
from tests.runtime.models import Run, engine_config, generate, random_prompts
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model

SHAPE = SpeculationConfig(draft_steps=1, draft_top_k=3, verify_tree_size=4)
NUM_LAYERS = 2
"""A recurrent layer and an attention layer."""
PROMPTS = random_prompts((5, 3))
WAYS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 5}}
LIMITS = {"max_num_seqs": 2, "max_model_len": 32, "num_kv_blocks": 20, "block_size": 4, "state_interval": 4}


def params(speculation: bool) -> list[SamplingParams]:
    """Parameters of a greedy request and of a sampled one."""
    fields = {"max_tokens": 6, "ignore_eos": True, "speculation": speculation}
    return [SamplingParams(**fields, **way) for way in WAYS.values()]


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2", "jamba"])
def test_captured_rounds_write_what_the_cpu_writes_eagerly(gpu, name):
    eager = prepare_model(random_hybrid(name, NUM_LAYERS, experts=False), name)
    expected, _ = generate(eager, engine_config(SHAPE, **LIMITS), None, PROMPTS, params(False))
    loaded = prepare_model(random_hybrid(name, NUM_LAYERS, experts=False).to(CUDA), name)
    sequences = [prompt + more for prompt, more in zip(PROMPTS, expected, strict=True)]
    drafter = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    engine = build_engine(loaded, engine_config(SHAPE, **LIMITS), drafter, InProcessChannel)
    for speculation in (True, False):
        assert Run(engine, PROMPTS, params(speculation)).finish() == expected
    stats = engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.eager_runs.keys() <= {Stage.BASE_MIXED, Stage.BASE_PROMPTS}
    assert stats.replays[Stage.BASE_VERIFICATION]
    assert stats.replays[Stage.BASE_DECODING]
    assert engine.drafter_state == "attached"
    assert engine.speculation.acceptance_length > 1.5
    engine.check_integrity()
