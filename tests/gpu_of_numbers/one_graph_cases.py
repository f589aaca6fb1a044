"""Rounds in one graph on the GPU of numbers: requests come and go, with the texts of plain rounds of the CPU."""

from functools import partial

import pytest

from tests.gpu_of_numbers.device import CUDA
from tests.runtime.models import Run, engine_config, generate, random_head, random_model, random_prompts
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import BENCHMARK_VARIABLE, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model

SHAPES = {
    "chain": SpeculationConfig(draft_steps=2, draft_top_k=1, verify_tree_size=3),
    "tree": SpeculationConfig(draft_steps=2, draft_top_k=2, verify_tree_size=4),
}
PROMPTS = random_prompts((5, 9, 4))
WAYS = {
    "greedy": [{"temperature": 0.0}] * 3,
    "tempered": [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.7, "seed": 6}],
    "one with rules": [{"temperature": 0.9, "top_p": 0.9, "seed": 5}, {"temperature": 0.0}, {"temperature": 0.0}],
}


def params(way: str, speculation: bool) -> list[SamplingParams]:
    """Parameters of the requests, the first of which ends early; the third waits for its slot."""
    fields = {"ignore_eos": True, "speculation": speculation}
    return [SamplingParams(**fields, max_tokens=count, **own) for count, own in zip((4, 8, 6), WAYS[way], strict=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_in_one_graph_write_what_plain_rounds_of_the_cpu_write(gpu, shape, way):
    loaded = prepare_model(random_model("llama", num_hidden_layers=2), "llama")
    expected, _ = generate(loaded, engine_config(SHAPES[shape]), None, PROMPTS, params(way, False))
    loaded = prepare_model(random_model("llama", num_hidden_layers=2).to(CUDA), "llama")
    drafter = EagleDrafter(random_head(loaded).to(CUDA), SHAPES[shape], CudaGraphDevice(CUDA))
    limits = engine_config(SHAPES[shape], max_num_seqs=2, max_model_len=64, max_num_batched_tokens=8, num_kv_blocks=16)
    engine = build_engine(loaded, limits, drafter, partial(InProcessChannel, device=CUDA))
    assert Run(engine, PROMPTS, params(way, True)).finish() == expected
    stats = engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.WHOLE_ROUND] >= 3
    assert engine.speculation.acceptance_length >= 1
    # Rounds of prompts have the usual graphs, and so have those beside sampling rules.
    assert stats.replays[Stage.BASE_MIXED]
    assert drafter.graph_stats.replays[Stage.DRAFT_PROPOSAL]
    assert engine.drafter_state == "attached"
    engine.check_integrity()


@pytest.mark.parametrize("shape", SHAPES)
def test_forced_paths_of_several_tokens_are_committed_as_by_the_drafters_own_pass(gpu, shape, monkeypatch):
    """Accepted drafts are the text here, so that a draft from a wrong commit would show."""
    monkeypatch.setenv(BENCHMARK_VARIABLE, "1")
    texts = []
    for is_whole in (True, False):
        loaded = prepare_model(random_model("llama", num_hidden_layers=2).to(CUDA), "llama")
        drafter = EagleDrafter(random_head(loaded).to(CUDA), SHAPES[shape], CudaGraphDevice(CUDA))
        limits = engine_config(
            SHAPES[shape],
            max_num_seqs=2,
            max_model_len=64,
            max_num_batched_tokens=8,
            num_kv_blocks=16,
            forced_acceptance=ForcedAcceptance.flat(0.7),
        )
        engine = build_engine(loaded, limits, drafter, partial(InProcessChannel, device=CUDA))
        if not is_whole:
            engine.runner.whole = None
        texts.append(Run(engine, PROMPTS, params("greedy", True)).finish())
        assert bool(engine.runner.graphs.stats.replays.get(Stage.WHOLE_ROUND)) == is_whole
        assert engine.speculation.acceptance_length > 1.4
    assert texts[0] == texts[1]
