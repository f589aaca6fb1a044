"""Capacity of a memory budget: number of blocks, and length of a sequence."""

import pytest
import torch

from wingbeat.runtime.config import LEAST_MODEL_LEN, EngineConfig, SpeculationConfig
from wingbeat.runtime.kv import pool
from wingbeat.runtime.kv.capacity import fit, num_seqs_held
from wingbeat.runtime.kv.pool import KVCache, LayerAttention, memory_budget

BLOCK = 1000
TREE = SpeculationConfig()


def limits(**fields) -> EngineConfig:
    return EngineConfig(**({"max_num_seqs": 2, "max_model_len": 4096, "speculation": TREE} | fields))


@pytest.mark.parametrize("num_blocks", [6, 7, 40, 256, 257, 258, 300, 5000])
def test_the_longest_sequence_is_the_models_or_what_the_blocks_hold(num_blocks: int):
    settled = fit(limits(lower_max_model_len=True), num_blocks * BLOCK + 999, BLOCK, 4096)
    assert settled.max_blocks_per_seq + 1 <= settled.num_kv_blocks <= num_blocks
    if settled.max_model_len < 4096:
        longer = limits(max_model_len=settled.max_model_len + 1)
        assert longer.max_blocks_per_seq + 1 > num_blocks, "one token more would have fitted"
    assert not settled.lower_max_model_len


def test_no_more_positions_are_taken_than_the_model_has():
    settled = fit(limits(lower_max_model_len=True), 10**9, BLOCK, 512)
    assert settled.max_model_len == 512


def test_blocks_that_are_counted_bound_the_sequence_too():
    settled = fit(limits(lower_max_model_len=True, num_kv_blocks=20), 0, BLOCK, 4096)
    assert (settled.num_kv_blocks, settled.max_model_len) == (20, 19 * 16 - TREE.num_nodes)


def test_a_length_that_was_asked_for_is_never_lowered():
    with pytest.raises(ValueError, match=r"bytes are left for KV .* one sequence of max_model_len 4096 needs 258000"):
        fit(limits(), 257 * BLOCK, BLOCK, 4096)
    assert fit(limits(), 258 * BLOCK, BLOCK, 4096).max_model_len == 4096


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"kv_cache_memory_bytes": 5000},
            f"kv_cache_memory_bytes is 5000: one sequence of {LEAST_MODEL_LEN} needs 6000",
        ),
        ({"num_kv_blocks": 5}, f"num_kv_blocks is 5: one sequence of {LEAST_MODEL_LEN} needs 6"),
        ({}, "5000 bytes are left for KV beside the weights"),
    ],
)
def test_memory_for_no_sequence_worth_serving_is_refused(fields: dict, says: str):
    with pytest.raises(ValueError, match=says):
        fit(limits(lower_max_model_len=True, **fields), 5000, BLOCK, 4096)


def test_a_pool_is_no_larger_than_all_slots_can_fill():
    assert fit(limits(max_model_len=64), 10**9, BLOCK).num_kv_blocks == 1 + 4 * 2 * 5


def test_the_pool_of_a_cpu_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "free_memory", lambda: 8000)
    cpu = torch.device("cpu")
    assert memory_budget(EngineConfig(), cpu) == 2000
    assert memory_budget(EngineConfig(cpu_memory_utilization=0.5), cpu) == 4000
    assert memory_budget(EngineConfig(kv_cache_memory_bytes=77), cpu) == 77
    monkeypatch.setattr(pool, "free_memory", lambda: None)
    assert memory_budget(EngineConfig(), cpu) == pool.UNKNOWN_RAM // 4


def test_a_cache_without_a_count_takes_what_the_budget_holds(monkeypatch: pytest.MonkeyPatch):
    layers = [LayerAttention(2, 2, 8, 8, None)]
    size = pool.block_bytes(layers, 16, torch.float32)
    monkeypatch.setattr(pool, "free_memory", lambda: 4 * 30 * size)
    cache = KVCache(layers, limits(max_model_len=64), torch.float32, torch.device("cpu"))
    assert cache.num_blocks == 30


def test_on_a_shared_gpu_what_others_hold_is_not_this_engines(monkeypatch: pytest.MonkeyPatch):
    cuda, total, own = torch.device("cuda"), 80 << 30, 10 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - (35 << 30), total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own)
    half = EngineConfig(gpu_share=0.5, gpu_memory_utilization=0.8)
    alone = memory_budget(half, cuda)
    assert alone == (32 << 30) - own - pool.CONTEXT_BYTES
    assert memory_budget(half, cuda, held_beside=2 << 30) == alone - (2 << 30) - pool.CONTEXT_BYTES
    assert memory_budget(half, cuda, reserved=3 << 30) == alone - (3 << 30)
    whole = EngineConfig(gpu_memory_utilization=0.8)
    assert memory_budget(whole, cuda, held_beside=2 << 30) == (64 << 30) - (35 << 30)


@pytest.mark.parametrize(("device", "owner"), [("cpu", "this machine"), ("cuda", "the GPU")])
def test_a_pool_larger_than_the_memory_is_refused_with_what_there_is(monkeypatch, device, owner):
    monkeypatch.setattr(pool, "total_memory", lambda: 2**34)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2**33, 2**34))
    config = EngineConfig(kv_cache_memory_bytes=900 * 10**9)
    said = f"kv_cache_memory_bytes is {900 * 10**9}: {owner} has {2**34} bytes of memory"
    with pytest.raises(ValueError, match=said):
        memory_budget(config, torch.device(device))
    assert memory_budget(EngineConfig(kv_cache_memory_bytes=2**30), torch.device(device)) == 2**30


@pytest.mark.parametrize(
    ("free_gib", "num_seqs"), [(52.7, 128), (101, 256), (22.6, 64), (3.8, 16)], ids=["H100", "H200", "L40S", "L4"]
)
def test_sequences_of_an_eight_billion_model_by_what_is_free_beside_its_weights(free_gib, num_seqs):
    # 32 layers of 8 KV heads of 128 in bfloat16, an EAGLE layer's KV, 16 nodes of 128,256 tokens.
    config = EngineConfig(max_num_seqs=256, max_model_len=131_072)
    token_bytes, seq_bytes = 131_072 + 4096, 17 * 16 * 128_256
    assert num_seqs_held(config, int(free_gib * 2**30), token_bytes, seq_bytes) == num_seqs


def test_sequences_are_no_more_than_blocks_and_no_more_than_asked_for():
    few = EngineConfig(max_num_seqs=256, max_model_len=64, num_kv_blocks=9)
    assert num_seqs_held(few, 1 << 40, 1, 1) == 8
    assert num_seqs_held(EngineConfig(max_num_seqs=3), 0, 1, 1) == 3
