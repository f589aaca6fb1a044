"""A memory budget holds more tokens, and the line about KV memory names the memory saved."""

import logging
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from tests.runtime.kv_windows.window_world import finish, windowed
from tests.runtime.models import Run, greedy, greedy_params, reference
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine import memory
from wingbeat.runtime.engine.memory import fit_to_memory
from wingbeat.runtime.kv.pool import block_bytes
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model

MIB = 1 << 20
LIMITS = EngineConfig(
    max_model_len=32768,
    lower_max_model_len=True,
    kv_cache_memory_bytes=256 * MIB,
    speculation=SpeculationConfig(draft_top_k=1, draft_steps=7),
)


@cache
def gemma_270m() -> LoadedModel:
    """Keys and values as in Gemma 3 270M: 18 layers, 15 of them with windows of 512; all else is small."""
    config = Gemma3TextConfig(
        **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "head_dim": 256},
        **{"num_key_value_heads": 1, "num_hidden_layers": 18, "sliding_window": 512, "max_position_embeddings": 32768},
    )
    torch.manual_seed(0)
    return prepare_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(), "gemma3 270m")


def line_of(caplog) -> str:
    (line,) = [record.getMessage() for record in caplog.records if record.name == memory.__name__]
    return line


@pytest.mark.parametrize(("num_seqs", "budget", "times"), [(4, 256, 4.3), (16, 256, 1.6), (16, 1024, 4.8)])
def test_a_budget_holds_several_times_the_tokens(caplog, num_seqs, budget, times):
    loaded, budget = gemma_270m(), budget * MIB
    limits = replace(LIMITS, max_num_seqs=num_seqs, kv_cache_memory_bytes=budget)
    whole = fit_to_memory(loaded, limits, DrafterNeeds())
    caplog.clear()
    with windowed(loaded), caplog.at_level(logging.INFO, memory.__name__):
        settled = fit_to_memory(loaded, limits, DrafterNeeds())
        assert loaded.kv_bytes(settled) <= budget
        cache = loaded.make_cache(loaded.limits(settled))
    assert settled.num_kv_blocks > times * whole.num_kv_blocks
    assert cache.num_blocks == settled.num_kv_blocks
    assert cache.num_bytes + cache.table_bytes <= budget
    saved = settled.num_kv_blocks * block_bytes(loaded.layers, 16, loaded.dtype) - cache.num_bytes
    assert f"15 layers with windows of 512 tokens keep {settled.num_window_blocks * 16} tokens" in line_of(caplog)
    assert f": {saved / MIB:.0f} MiB less" in line_of(caplog)


def test_whole_contexts_stay_where_windows_of_all_sequences_take_more(caplog):
    loaded, limits = gemma_270m(), replace(LIMITS, max_num_seqs=64)
    whole = fit_to_memory(loaded, limits, DrafterNeeds())
    caplog.clear()
    with windowed(loaded), caplog.at_level(logging.INFO, memory.__name__):
        settled = fit_to_memory(loaded, limits, DrafterNeeds())
        assert type(loaded.make_cache(loaded.limits(settled))).__name__ == "KVCache"
    assert settled.num_kv_blocks == whole.num_kv_blocks
    assert "keep whole contexts, because 64 windows would take as much memory" in line_of(caplog)


def test_more_tokens_are_found_again_than_the_layers_with_windows_hold():
    ref, length = reference("gemma3"), 256
    config = EngineConfig(
        **{"max_num_seqs": 2, "max_model_len": 300, "max_num_batched_tokens": 64, "num_kv_blocks": 60},
        speculation=SpeculationConfig(draft_top_k=1),
    )
    prompts = [[(7 * number + place * place) % 97 for place in range(length)] for number in range(3)]
    with windowed(ref.loaded) as loaded:
        engine = build_engine(loaded, config, None, InProcessChannel)
        texts = [finish(Run(engine, [prompt], greedy_params(8)))[0] for prompt in prompts]
        for prompt, text in zip(prompts, texts, strict=True):
            longer = [*prompt, *text, 5]
            run = Run(engine, [longer], greedy_params(8))
            assert finish(run) == greedy(loaded.model, [longer], 8)[0]
            assert run.last[0].num_cached_tokens == length
        engine.model.remove_taps()
    assert engine.cache.beside.num_places * config.block_size < len(prompts) * length
