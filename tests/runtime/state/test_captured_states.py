"""Captured rounds of hybrids write what eager ones write, with the host a round behind them and without."""

import pytest

from tests.runtime.hybrids import CONFIGS, NUM_TOKENS, hybrid, needs_states
from tests.runtime.lossless_table import drafter_of
from tests.runtime.models import CHAIN, TREE, Run, engine_config, generate, greedy_params
from tests.runtime.poisoned_graphs import PoisoningDevice
from tests.runtime.recorded_graphs import RecordingDevice, RepeatingDevice
from tests.runtime.scripted import ScriptedDrafter, right_chain, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import SamplingParams

pytestmark = needs_states

SHAPES = {"chain": (CHAIN, right_chain), "tree": (TREE, right_tree)}
KINDS = ("lfm2", "qwen3_next", "falcon_h1", *(name for name in CONFIGS if name not in ("qwen3_next", "falcon_h1")))
"""A short convolution, a gated delta net and Mamba-2 first."""


def config_of(speculation, **limits):
    """Limits under which states are kept at the end of every other block."""
    return engine_config(speculation, block_size=4, state_interval=8, num_kv_blocks=400, max_num_seqs=3, **limits)


def captured(ref, device, drafter, params, speculation, **limits):
    """The texts of a reference's prompts in captured rounds, and what was replayed."""
    engine = build_engine(ref.loaded, config_of(speculation, **limits), drafter, InProcessChannel, device)
    try:
        texts = Run(engine, ref.prompts, params).finish()
    finally:
        engine.model.remove_taps()
    engine.check_integrity()
    return texts, engine


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
@pytest.mark.parametrize(
    ("kind", "shape"), [("right", "tree"), ("right", "chain"), ("none", "tree"), ("random", "tree"), ("eagle", "tree")]
)
@pytest.mark.parametrize("name", dict.fromkeys(KINDS))
def test_captured_text_is_that_of_generate(name, kind, shape, overlap):
    """Each replay ruins what the other graphs left; states are kept in the middle of accepted paths."""
    ref, (speculation, _) = hybrid(name), SHAPES[shape]
    device, drafter = PoisoningDevice(RecordingDevice()), drafter_of(kind, ref, speculation)
    texts, engine = captured(ref, device, drafter, greedy_params(NUM_TOKENS), speculation, overlap=overlap)
    assert texts == ref.continuations
    stats = engine.stats().graphs
    assert stats.replays[Stage.BASE_DECODING if kind == "none" else Stage.BASE_VERIFICATION]
    assert stats.eager_runs.keys() <= {Stage.BASE_MIXED, Stage.BASE_PROMPTS}, "prompts alone are not captured"
    assert device.num_poisoned
    if kind == "right":
        assert engine.speculation.acceptance_length > 4


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", dict.fromkeys(KINDS))
def test_captured_sampled_text_is_the_eager_one(name, shape):
    ref, (speculation, plan) = hybrid(name), SHAPES[shape]
    params = [SamplingParams(30, 0.8, 0.9, seed=seed, ignore_eos=True) for seed in range(len(ref.prompts))]
    plain, _ = generate(ref.loaded, config_of(speculation), None, ref.prompts, params)
    sequences = [prompt + more for prompt, more in zip(ref.prompts, plain, strict=True)]
    drafter = ScriptedDrafter(sequences, plan, ref.loaded.vocab_size)
    texts, engine = captured(ref, RepeatingDevice(), drafter, params, speculation, overlap=True)
    assert texts == plain
    assert engine.speculation.acceptance_length > 4
    assert engine.stats().graphs.failed == []


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["right", "none"])
@pytest.mark.parametrize("name", dict.fromkeys(KINDS))
def test_states_that_captured_rounds_keep_are_those_of_their_prefixes(name, kind):
    """A second turn goes on behind the first one's answer, whose states were kept by graphs."""
    ref = hybrid(name)
    config = config_of(TREE, overlap=True)
    engine = build_engine(ref.loaded, config, drafter_of(kind, ref, TREE), InProcessChannel, RecordingDevice())
    try:
        first = Run(engine, ref.prompts, greedy_params(20)).finish()
        prompts = [prompt + more for prompt, more in zip(ref.prompts, first, strict=True)]
        run = Run(engine, prompts, greedy_params(NUM_TOKENS - 20))
        assert run.finish() == [tokens[20:] for tokens in ref.continuations]
    finally:
        engine.model.remove_taps()
    assert [run.last[index].num_cached_tokens for index in range(len(prompts))] == [
        (len(prompt) - 1) // 8 * 8 for prompt in prompts
    ]


def test_few_rows_for_states_are_given_from_one_sequence_to_the_next():
    """Rows are taken ahead of the rounds that fill them: a row that was given away is not written by its last owner."""
    ref, device = hybrid("lfm2"), RecordingDevice()
    limits = {"overlap": True, "num_saved_states": 2, "max_model_len": 96, "num_kv_blocks": 36}
    config = engine_config(TREE, block_size=4, state_interval=8, max_num_seqs=3, **limits)
    engine = build_engine(ref.loaded, config, drafter_of("right", ref, TREE), InProcessChannel, device)
    try:
        for _ in range(2):
            assert Run(engine, ref.prompts, greedy_params(NUM_TOKENS)).finish() == ref.continuations
            engine.check_integrity()
    finally:
        engine.model.remove_taps()
