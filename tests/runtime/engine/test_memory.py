"""Memory left for KV: the largest round, the graphs and the drafter are counted on a GPU of shapes."""

import gc
import logging
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.runtime.fake_gpu import FakeGpu, fake_gpu, why_not
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.fake_gpu_tensor import METER, GpuTensor
from tests.runtime.gpu_world import TREE, VOCAB_SIZE, engine_config, new_drafter, verifier
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine import memory
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.engine.memory import GRAPH_BYTES, activation_bytes, fit_to_memory, reserved_bytes
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.kv.pool import block_bytes
from wingbeat.runtime.round.shapes import num_graphs

NEEDS = DrafterNeeds((0, 1), keeps_context=True, token_bytes=512, held_bytes=1 << 20)
LIMITS = replace(engine_config(TREE, 4), num_kv_blocks=None)


@pytest.fixture
def gpu():
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with fake_gpu() as mode:
        METER.reset(on=True)
        try:
            yield mode
        finally:
            METER.reset()


@pytest.mark.slow
def test_the_largest_round_is_measured_and_leaves_nothing_behind(gpu: FakeGpu):
    loaded = verifier()
    chunks, trees = activation_bytes(loaded, LIMITS, NEEDS)
    pools = [held for held in gc.get_objects() if type(held) is GpuTensor and held.shape[1:] == (16, 2, 16)]
    assert not pools, "keys or values of the small pool"
    rows = LIMITS.max_num_seqs * TREE.num_nodes
    assert trees >= rows * VOCAB_SIZE * loaded.dtype.itemsize, "logits of every node"
    assert chunks >= LIMITS.max_num_batched_tokens * 96 * loaded.dtype.itemsize, "the widest product of a chunk"
    longer, _ = activation_bytes(loaded, replace(LIMITS, max_num_batched_tokens=96), NEEDS)
    assert longer > chunks
    _, wider = activation_bytes(loaded, replace(LIMITS, max_num_seqs=16), NEEDS)
    assert wider > trees


@pytest.mark.slow
def test_graphs_are_counted_where_they_are_captured(gpu: FakeGpu):
    loaded = verifier()
    engine = Engine(loaded, engine_config(TREE, 4), NEEDS, FakeGraphDevice(gpu))
    engine.runner.prepare_trees()
    captured = [stage for stage, _ in engine.runner.graphs.stats.captured]
    assert {Stage.BASE_DECODING, Stage.BASE_VERIFICATION} <= set(captured)
    assert num_graphs(LIMITS) == len(captured)
    eager = reserved_bytes(loaded, replace(LIMITS, cuda_graphs=False), DrafterNeeds())
    with_graphs = reserved_bytes(loaded, LIMITS, DrafterNeeds())
    assert with_graphs >= eager + len(captured) * GRAPH_BYTES


def test_weights_activations_graphs_and_drafter_leave_the_rest_to_kv(gpu: FakeGpu, monkeypatch, caplog):
    loaded, total = verifier(), 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - (100 << 20), total))
    monkeypatch.setattr(memory, "reserved_bytes", lambda *args: 200 << 20)
    config = replace(LIMITS, max_num_seqs=10**6, max_model_len=10**9, lower_max_model_len=True)
    size = block_bytes(loaded.layers, 16, loaded.dtype)
    budget = int(0.9 * total) - (300 << 20)
    with caplog.at_level(logging.INFO, "wingbeat"):
        settled = fit_to_memory(loaded, config, NEEDS)
    assert settled.max_model_len == loaded.max_position_embeddings
    assert settled.num_kv_blocks == budget // (size + 512 * 16), "the drafter keeps its own KV under every block"
    (line,) = [record.getMessage() for record in caplog.records if record.name == memory.__name__]
    assert f"max_model_len is {settled.max_model_len}" in line
    assert f"{(settled.num_kv_blocks - 1) * 16} tokens" in line
    elsewhere = fit_to_memory(loaded, replace(config, drafter_beside=False), NEEDS)
    assert elsewhere.num_kv_blocks == budget // size
    given = fit_to_memory(loaded, replace(config, kv_cache_memory_bytes=100 * size), NEEDS)
    assert given.num_kv_blocks == 100
    assert given.max_model_len == 99 * 16 - TREE.num_nodes


@pytest.mark.slow
def test_a_drafter_beside_is_reserved_its_passes(gpu: FakeGpu, monkeypatch):
    loaded = verifier()
    monkeypatch.setattr(memory, "activation_bytes", lambda *args: (1000, 2000))
    without = reserved_bytes(loaded, LIMITS, NEEDS._replace(held_bytes=0))
    beside = reserved_bytes(loaded, LIMITS, NEEDS)
    elsewhere = reserved_bytes(loaded, replace(LIMITS, drafter_beside=False), NEEDS)
    assert elsewhere == without < beside


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["eagle-3", "draft-model", "mtp"])
def test_a_drafter_says_what_a_position_costs_it(gpu: FakeGpu, kind: str):
    drafter = new_drafter(kind, TREE, None)
    engine = Engine(verifier(), engine_config(TREE, 2, cuda_graphs=False), drafter.needs)
    drafter.pool.resize(engine.channel_spec, 2, 10)
    small = METER.allocated
    drafter.pool.resize(engine.channel_spec, 2, 110)
    assert METER.allocated - small == 100 * 16 * drafter.needs.token_bytes


def test_a_round_too_large_for_the_gpu_is_refused_by_its_limits(gpu: FakeGpu, monkeypatch):
    def too_large(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(memory, "activation_bytes", too_large)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 16 and max_num_seqs is 4: .* lower them"):
        fit_to_memory(verifier(), LIMITS, NEEDS)


@pytest.mark.few(1)
@pytest.mark.parametrize(("share", "warned"), [(11, True), (9, False)])
def test_a_memory_that_holds_less_than_a_tenth_of_the_positions_is_warned_of_once(
    gpu: FakeGpu, monkeypatch, caplog, share, warned
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    loaded = replace(verifier(), max_position_embeddings=9900)
    config = replace(LIMITS, max_model_len=9900, lower_max_model_len=True)
    size = block_bytes(loaded.layers, 16, loaded.dtype)
    blocks = 1 + (9900 // share + TREE.num_nodes) // 16
    fit_to_memory(loaded, replace(config, kv_cache_memory_bytes=blocks * size), DrafterNeeds())
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.startswith("max_model_len is") for line in said] == [True] * warned
    caplog.clear()
    asked_for = replace(config, max_model_len=200, lower_max_model_len=False)
    fit_to_memory(loaded, replace(asked_for, kv_cache_memory_bytes=100 * size), DrafterNeeds())
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_sequences_are_as_many_as_the_memory_holds_unless_they_are_given(gpu: FakeGpu, monkeypatch):
    loaded, total = verifier(), 1 << 30
    monkeypatch.setattr(memory, "reserved_bytes", lambda *args: 0)
    # Bytes per sequence: 1,024 tokens, the drafter's memory for each, and 23 bytes per node and vocabulary entry.
    token_bytes = block_bytes(loaded.layers, 16, loaded.dtype) // 16 + NEEDS.token_bytes
    each = min(1024, LIMITS.max_model_len) * token_bytes + 23 * TREE.num_nodes * VOCAB_SIZE
    for held, expected in ((70, 64), (63, 32), (1, 16)):
        free = int(held * each / 0.75) + 1
        used = int(0.9 * total) - free
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, used=used: (total - used, total))
        settled = fit_to_memory(loaded, replace(LIMITS, max_num_seqs=256, lower_max_num_seqs=True), NEEDS)
        assert settled.max_num_seqs == expected
        assert not settled.lower_max_num_seqs
        assert fit_to_memory(loaded, replace(LIMITS, max_num_seqs=256), NEEDS).max_num_seqs == 256


def test_fewer_sequences_are_tried_where_rounds_of_more_do_not_fit_unless_they_are_given(gpu: FakeGpu, monkeypatch):
    loaded, tried = verifier(), []

    def reserved(loaded: object, config: EngineConfig, needs: DrafterNeeds) -> int:
        tried.append(config.max_num_seqs)
        if config.max_num_seqs > most:
            raise ValueError("the GPU has no memory for such a round")
        return 0

    monkeypatch.setattr(memory, "reserved_bytes", reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    most, left_open = 64, replace(LIMITS, max_num_seqs=256, lower_max_num_seqs=True)
    assert fit_to_memory(loaded, left_open, NEEDS).max_num_seqs == 64
    assert tried == [256, 128, 64]
    with pytest.raises(ValueError, match="no memory"):
        fit_to_memory(loaded, replace(LIMITS, max_num_seqs=256), NEEDS)
    most = 15
    with pytest.raises(ValueError, match="no memory"):
        fit_to_memory(loaded, left_open, NEEDS)


@pytest.mark.few(1)
@pytest.mark.parametrize(("rounds", "expected"), [(16, 2048), (15.9, 1024), (8, 1024), (7.9, 512), (0.1, 512)])
def test_a_round_takes_fewer_prompt_tokens_where_memory_is_short_unless_they_are_given(
    gpu: FakeGpu, monkeypatch, caplog, rounds, expected
):
    """The KV cache must hold 16 rounds of that many prompt tokens."""
    loaded, total = replace(verifier(), max_position_embeddings=9900), 1 << 30
    monkeypatch.setattr(memory, "reserved_bytes", lambda *args: 0)
    tokens = int(rounds * 2048) // 16 * 16
    free = tokens * block_bytes(loaded.layers, 16, loaded.dtype) // 16
    used = int(0.9 * total) - free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - used, total))
    given = replace(LIMITS, max_num_batched_tokens=2048, lower_max_model_len=True)
    left_open = replace(given, lower_max_num_batched_tokens=True)
    with caplog.at_level(logging.INFO, "wingbeat"):
        settled = fit_to_memory(loaded, left_open, DrafterNeeds())
    assert (settled.max_num_batched_tokens, settled.lower_max_num_batched_tokens) == (expected, False)
    [line] = [record.getMessage() for record in caplog.records if "KV memory" in record.getMessage()]
    assert f"max_num_batched_tokens is {expected};" in line
    for fixed in (given, replace(left_open, num_kv_blocks=10), replace(left_open, kv_cache_memory_bytes=1 << 20)):
        assert fit_to_memory(loaded, fixed, DrafterNeeds()).max_num_batched_tokens == 2048


@pytest.mark.slow
def test_fewer_prompt_tokens_are_tried_where_a_round_does_not_fit_at_all(gpu: FakeGpu, monkeypatch):
    tried = []

    def reserved(loaded: object, config: EngineConfig, needs: DrafterNeeds) -> int:
        tried.append((config.max_num_seqs, config.max_num_batched_tokens))
        if config.max_num_batched_tokens > 700:
            raise ValueError("the GPU has no memory for such a round")
        return 0

    monkeypatch.setattr(memory, "reserved_bytes", reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    limits = replace(LIMITS, max_num_seqs=32, max_num_batched_tokens=2048, lower_max_num_seqs=True)
    limits = replace(limits, lower_max_num_batched_tokens=True)
    assert fit_to_memory(verifier(), limits, NEEDS).max_num_batched_tokens == 512
    assert tried == [(32, 2048), (16, 2048), (16, 1024), (16, 512)]
    with pytest.raises(ValueError, match="no memory"):
        fit_to_memory(verifier(), replace(limits, lower_max_num_batched_tokens=False), NEEDS)
