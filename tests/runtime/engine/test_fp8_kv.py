"""With an 8-bit KV cache, texts are those of plain decoding over an 8-bit KV cache, whatever is drafted.

A key that rounding leaves between two neighbours of eight bits may be either of them, by what else is in its round.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.near_ties import FLIPPED, check_same_texts
from tests.runtime.hybrids import hybrid, needs_states
from tests.runtime.models import (
    CHAIN,
    DEMO_PAIR,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    generate,
    greedy_params,
    new_engine,
    reference,
)
from tests.runtime.scripted import ScriptedDrafter, right_tree
from tests.runtime.written_texts import write
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.kv import pool
from wingbeat.runtime.pair import PairSettings, engine_of_pair
from wingbeat.runtime.scheduling.request import SamplingParams

pytestmark = pytest.mark.few(1)

FP8 = {"kv_cache_dtype": "fp8"}
LENGTH = 40
ROOMS = {
    "roomy": {},
    # Requests are preempted, prompts come in pieces, blocks are taken again.
    "tight": {"max_model_len": 128, "num_kv_blocks": 14, "max_num_batched_tokens": 24},
}
SHAPES = {"chain": CHAIN, "tree": TREE}


def mixed():
    """Sampling parameters of eight requests, alternately greedy and sampled."""
    sampled = [SamplingParams(LENGTH, 0.8, 0.95, seed=seed, ignore_eos=True) for seed in range(4)]
    return [param for own in sampled for param in (greedy_params(LENGTH), own)]


@cache
def plain(model):
    """Texts of an engine with ample memory and no drafter."""
    ref = reference(model)
    return plainly(ref.loaded, engine_config(**FP8), ref.prompts, mixed())


def plainly(loaded, config, prompts, params):
    """Texts of a new engine without drafts."""
    engine = new_engine(loaded, config)
    try:
        return write(engine, prompts, params)
    finally:
        engine.model.remove_taps()


@pytest.mark.parametrize("room", list(ROOMS))
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_speculation_changes_no_token(model, shape, room):
    ref, speculation = reference(model), SHAPES[shape]
    config = engine_config(speculation, **FP8, **ROOMS[room])
    tokens, engine = generate(ref.loaded, config, eagle_drafter(ref.loaded, speculation), ref.prompts, mixed())
    check_same_texts(tokens, plain(model), FLIPPED)
    assert all(part.dtype == torch.float8_e4m3fn for pair in engine.cache.layers for part in pair)
    assert (engine.stats().num_preemptions > 0) == (room == "tight")
    assert engine.speculation.num_drafts > 0


@pytest.mark.parametrize("on_host", [True, False], ids=["own-shapes", "fixed-shapes"])
def test_accepted_paths_leave_the_text_as_it_is(on_host):
    ref, expected = reference("llama"), plain("llama")
    sequences = [prompt + text.token_ids for prompt, text in zip(ref.prompts, expected, strict=True)]
    engine = new_engine(
        ref.loaded, engine_config(**FP8), ScriptedDrafter(sequences, right_tree, ref.loaded.vocab_size), on_host
    )
    try:
        check_same_texts(Run(engine, ref.prompts, mixed()).finish(), expected, FLIPPED)
    finally:
        engine.model.remove_taps()
    assert engine.speculation.acceptance_length > 4


def test_a_policy_measures_its_costs_over_such_a_pool():
    ref, speculation = reference("llama"), SpeculationConfig(draft_steps=3, draft_top_k=2, adaptive=True)
    config = engine_config(speculation, **FP8)
    tokens, _ = generate(ref.loaded, config, eagle_drafter(ref.loaded, speculation), ref.prompts, mixed())
    check_same_texts(tokens, plain("llama"), FLIPPED)


def test_a_prefix_that_is_found_gives_the_text_of_one_that_is_computed():
    ref = reference("llama")
    engine = new_engine(ref.loaded, engine_config(**FP8))
    try:
        for again in (False, True):
            run = Run(engine, ref.prompts, mixed())
            check_same_texts(run.finish(), plain("llama"), FLIPPED)
            assert (run.last[4].num_cached_tokens > 0) == again
    finally:
        engine.model.remove_taps()


def test_keys_are_rounded_and_blocks_are_small():
    ref = reference("llama")
    tokens, engine = generate(ref.loaded, engine_config(**FP8), None, ref.prompts, greedy_params(LENGTH))
    wide, other = generate(ref.loaded, engine_config(), None, ref.prompts, greedy_params(LENGTH))
    assert wide == [row[:LENGTH] for row in ref.continuations]
    assert tokens != wide
    assert 4 * engine.cache.block_bytes == other.cache.block_bytes
    assert sum(part.nbytes for pair in engine.cache.layers for part in pair) == 200 * engine.cache.block_bytes


def test_a_budget_holds_four_times_the_blocks_of_float32():
    loaded, budget = reference("llama").loaded, 300_000
    fields = {"num_kv_blocks": None, "kv_cache_memory_bytes": budget, "max_model_len": 32}
    sizes = [new_engine(loaded, engine_config(**fields, **own)).cache.num_blocks for own in ({}, FP8)]
    assert sizes[1] // sizes[0] == 4


@pytest.mark.slow
@needs_states
@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_speculation_changes_no_token_of_a_hybrid(name):
    ref, limits = hybrid(name), {"block_size": 4, "state_interval": 8, "num_kv_blocks": 400}
    config, params = engine_config(**FP8, **limits), mixed()[: len(ref.prompts)]
    tokens, engine = generate(ref.loaded, config, eagle_drafter(ref.loaded, TREE), ref.prompts, params)
    check_same_texts(tokens, plainly(ref.loaded, config, ref.prompts, params), FLIPPED)
    assert {part.dtype for pair in engine.cache.layers for part in pair} == {torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"engine_dir": Path("/engine")}, "kv_cache_dtype is fp8 and engine_dir is given"),
    ],
    ids=["tensorrt"],
)
def test_backends_that_round_nothing_refuse_it(others, message):
    choice = parse_drafter("none", DEMO_PAIR / "verifier")
    settings = PairSettings(DEMO_PAIR / "verifier", choice, engine_config(**FP8), torch.float32, **others)
    with pytest.raises(ValueError, match=message):
        engine_of_pair(settings, "cpu", lambda *_: None)


def test_limits_refuse_a_dtype_that_is_not_there():
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int8': use one of auto, fp8"):
        EngineConfig(kv_cache_dtype="int8")


def test_a_gpu_without_fp8_is_refused_by_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"kv_cache_dtype is fp8: .* capability is 8\.0, 8\.9 is needed"):
        pool.KVCache([], engine_config(**FP8), torch.bfloat16, torch.device("cuda"))
