"""Layers that keep windows alone, on the GPU of numbers: captured rounds write what the CPU writes."""

from tests.gpu_of_numbers.device import CUDA
from tests.runtime.kv_windows.window_world import finish, windowed
from tests.runtime.models import Run, engine_config, generate, greedy_params, random_model, random_prompts
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.verifier.loading.loader import prepare_model

SHAPE = SpeculationConfig(draft_steps=1, draft_top_k=3, verify_tree_size=4)
LIMITS = {"max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 8, "num_kv_blocks": 24, "block_size": 4}
PROMPTS = random_prompts((17, 3))
NUM_TOKENS = 9


def verifier():
    """A layer with a window of 8 tokens and one without."""
    return random_model(
        "gemma3", num_hidden_layers=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )


def test_windows_alone_write_what_whole_contexts_write(gpu):
    """A prompt of several windows comes in chunks, and memory without an owner holds garbage."""
    params = greedy_params(NUM_TOKENS)
    expected, _ = generate(prepare_model(verifier(), "gemma3"), engine_config(SHAPE, **LIMITS), None, PROMPTS, params)
    sequences = [prompt + more for prompt, more in zip(PROMPTS, expected, strict=True)]
    with windowed(prepare_model(verifier().to(CUDA), "gemma3")) as loaded:
        drafter = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
        limits = engine_config(SHAPE, **LIMITS, num_window_blocks=18)
        engine = build_engine(loaded, limits, drafter, InProcessChannel)
        assert finish(Run(engine, PROMPTS, params)) == expected
    stats = engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.BASE_VERIFICATION]
    assert stats.replays[Stage.BASE_MIXED]
    assert gpu.launches["_move_kv_kernel"] > 0
    assert engine.speculation.acceptance_length > 1.5
    assert engine.cache.beside.num_held == 0
