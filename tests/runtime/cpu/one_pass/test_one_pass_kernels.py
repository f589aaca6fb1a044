"""A one-pass head on the CPU's kernels drafts what torch's operations draft, directly and through a channel."""

import platform
from dataclasses import replace

import pytest
import torch

from tests.runtime.by_torch import by_torch
from tests.runtime.cpu.drafting.kernel_drafts import WITH_RULE, assert_same, reply_of
from tests.runtime.draft_world import MIXED, NUM_SLOTS, World, channel_spec
from tests.runtime.models import CHAIN, TREE
from tests.runtime.one_pass.one_pass_drafts import LENS, TAPS, TARGET, load
from tests.runtime.one_pass.one_pass_world import DFLASH2, FAMILIES, HEADS, random_tensors, raw_config, save_head
from tests.runtime.one_pass.parallel_eagle_world import parallel_config, parallel_tensors
from wingbeat.kernels.cpu import library
from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.cpu.drafting import kernel_passes
from wingbeat.runtime.cpu.heads import kernel_head
from wingbeat.runtime.cpu.layers import packed_linears
from wingbeat.runtime.cpu.one_pass import kernel_block
from wingbeat.runtime.one_pass.load import read_one_pass_checkpoint
from wingbeat.runtime.one_pass.one_pass_drafter import OnePassDrafter, ParallelEagleDrafter
from wingbeat.runtime.one_pass.parallel_eagle import load_parallel_head

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
GREEDY = (0.0,) * NUM_SLOTS
SHAPES = {"chain": CHAIN, "tree": TREE, "one": SpeculationConfig(1, 3, 3), "short": SpeculationConfig(2, 1, 3)}
SURE = {"enable_confidence_head": True}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
BUILDS = {"x86-64": "sse2", "x86-64-v3": "avx2"}
READINGS = {
    "biases": ("dflash", {"attention_bias": True}),
    "sliding, causal": ("dflash", SLIDING),
    "sliding, not causal": ("jetspec", SLIDING | {"is_causal": False}),
    "scaled and capped": (
        "dflash2",
        {"dflash_config": DFLASH2 | {"output_multiplier": 0.7, "final_logit_softcapping": 5}},
    ),
    "scaled embeddings": ("dflash2", {"dflash_config": DFLASH2 | {"input_embedding_scale": 3.0}}),
    "three taps of a convolution": ("dflash2", {"dflash_config": DFLASH2 | {"conv_kernel_size": 3}}),
    "sure of its tokens": ("dspark-gated", SURE),
    "sure without pairs": ("dspark-none", SURE),
    "sure in a state": ("dspark-rnn", SURE),
}


def head_of(folder, family, num_layers=2, dtype=torch.float32, **fields):
    raw = raw_config(family, TAPS, num_layers, block_size=7, **fields)
    tensors = random_tensors(raw)
    for name, size in (("q", HEADS), ("k", 2), ("v", 2), ("o", 4)) if fields.get("attention_bias") else ():
        for index in range(num_layers):
            tensors[f"layers.{index}.self_attn.{name}_proj.bias"] = torch.linspace(-1, 1, size * 16)
    return load(folder, raw, tensors, dtype)


def parallel_head(folder, num_layers):
    raw = parallel_config((0, 3, 6), num_layers)
    return load_parallel_head(
        read_one_pass_checkpoint(save_head(folder, raw, parallel_tensors(raw))), TARGET, torch.float32, "cpu"
    )


def pair_of(head, speculation, temperatures=MIXED, lens=LENS):
    """Two drafters fed with the same sequences, one on kernels and one on torch's operations, and the sequences."""
    kind = OnePassDrafter if hasattr(head, "run_block") else ParallelEagleDrafter
    drafters = [kind(head, speculation) for _ in range(2)]
    spec = channel_spec(speculation, head.taps_size)
    world = World(speculation, head.taps_size, lens, temperatures)
    with torch.inference_mode():
        drafters[0].resize(spec, spec.num_slots, spec.num_blocks)
        by_torch(lambda: drafters[1].resize(spec, spec.num_slots, spec.num_blocks))
        assert [drafter.passes is None for drafter in drafters] == [False, True]
        for drafter in drafters:
            world.feed(drafter)
    return *drafters, world


@torch.inference_mode()
def assert_alike(mine, other, world, **fields):
    for cache, expected in zip(mine.pool.caches, other.pool.caches, strict=True):
        for part, wanted in zip(cache, expected, strict=True):
            committed = mine.pool.num_blocks
            torch.testing.assert_close(part[1:committed], wanted[1:committed], atol=2e-5, rtol=1e-5)
    batch = world.batch(proposals=world.slots)._replace(**fields)
    assert_same(mine.draft(batch), other.draft(batch))


@pytest.mark.few(4)
@pytest.mark.parametrize("temperatures", [GREEDY, MIXED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculation", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_and_keys_are_those_of_torch(tmp_path, family, speculation, temperatures):
    assert_alike(*pair_of(head_of(tmp_path, family), speculation, temperatures))


@pytest.mark.parametrize("num_layers", [1, 5])
@pytest.mark.parametrize("family", ["dflash", "jetspec", "dspark-rnn", "dflash2"])
def test_a_head_may_have_any_number_of_layers(tmp_path, family, num_layers):
    assert_alike(*pair_of(head_of(tmp_path, family, num_layers), TREE))


@pytest.mark.parametrize("speculation", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_p_eagle_trees_and_keys_are_those_of_torch(tmp_path, num_layers, speculation):
    mine, other, world = pair_of(parallel_head(tmp_path, num_layers), speculation)
    torch.testing.assert_close(mine.hidden, other.hidden, atol=2e-5, rtol=1e-5)
    assert_alike(mine, other, world)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", READINGS)
def test_a_head_is_read_as_it_is_read_by_torch(tmp_path, name):
    family, fields = READINGS[name]
    for speculation in (CHAIN, TREE):
        assert_alike(*pair_of(head_of(tmp_path / str(speculation.draft_top_k), family, **fields), speculation))


def test_sinks_are_read(tmp_path):
    raw = raw_config("dflash", TAPS, 1, block_size=7, dflash_config={"attention_sink_bias": True})
    tensors = random_tensors(raw) | {"layers.0.self_attn.attention_sink_bias": torch.tensor([0.0, 3.0, -2.0, 9.0])}
    assert_alike(*pair_of(load(tmp_path, raw, tensors), CHAIN))


@torch.inference_mode()
def test_all_levels_are_grown_whatever_is_asked_for(tmp_path):
    mine, other, world = pair_of(head_of(tmp_path, "dflash"), CHAIN)
    batch = world.batch(proposals=world.slots, max_levels=1)
    tree = mine.draft(batch)
    assert tree.depths.max() == CHAIN.draft_steps
    assert_same(tree, other.draft(batch))


@WITH_RULE
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["dflash", "dspark-rnn", "dflash2", "p-eagle"])
@torch.inference_mode()
def test_a_channels_round_is_answered_as_it_is_drafted(tmp_path, family, speculation, with_rule, monkeypatch):
    head = parallel_head(tmp_path, 2) if family == "p-eagle" else head_of(tmp_path, family)
    kind = ParallelEagleDrafter if family == "p-eagle" else OnePassDrafter
    drafters = [kind(head, speculation) for _ in range(2)]
    monkeypatch.setattr(drafters[1], "answer", lambda end, outcome: False)
    replies = [reply_of(drafter, with_rule) for drafter in drafters]
    assert torch.equal(replies[0].num_valid, replies[1].num_valid)
    for row, count in enumerate(replies[0].num_valid[:3].tolist()):
        for name in ("token_ids", "parents", "depths"):
            mine, expected = (getattr(reply, name)[row, :count].tolist() for reply in replies)
            assert mine == expected, name
        torch.testing.assert_close(*(reply.scores[row, :count] for reply in replies), atol=1e-6, rtol=0)


def test_a_round_that_names_what_its_channel_has_not_is_refused(tmp_path):
    def spoil(outcome):
        outcome.decode_slots[0] = NUM_SLOTS

    drafter = OnePassDrafter(head_of(tmp_path, "dflash2"), CHAIN)
    with pytest.raises(ValueError, match="a round refers to slots or positions outside its channel"):
        reply_of(drafter, False, spoil)


@torch.inference_mode()
def test_threads_that_are_tried_change_no_tree(tmp_path):
    mine, _, world = pair_of(head_of(tmp_path, "dflash2"), TREE)
    batch = world.batch(proposals=world.slots)
    alone = mine.draft(batch)
    mine.try_threads(2)
    mine.passes.num_threads = 2
    together = mine.draft(batch)
    cpu_kernels().use_threads(1)
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


@torch.inference_mode()
def test_weights_of_two_bytes_are_read(tmp_path):
    """Only rotary angles, and keys and values where they are stored, are rounded as well."""
    rounded = head_of(tmp_path / "two", "dflash2", dtype=torch.bfloat16)
    drafters = [OnePassDrafter(rounded, CHAIN), OnePassDrafter(head_of(tmp_path / "four", "dflash2"), CHAIN)]
    spec = channel_spec(CHAIN, rounded.taps_size)
    world = World(CHAIN, rounded.taps_size, LENS)
    for drafter in drafters:
        drafter.resize(spec, spec.num_slots, spec.num_blocks)
        world.feed(drafter)
    assert drafters[0].passes is not None
    assert drafters[0].pool.caches[0][0].dtype == torch.bfloat16
    scores = [drafter.draft(world.batch(proposals=world.slots)).scores[:, 1] for drafter in drafters]
    torch.testing.assert_close(*scores, atol=0.1, rtol=0)


@pytest.mark.parametrize("family", ["dflash", "dspark-rnn", "dflash2"])
@torch.inference_mode()
def test_rows_may_be_rounded_as_weights_are(tmp_path, family):
    """Weights of a bfloat16 checkpoint are exact in 2 bytes; some processors multiply them by rounded activations."""
    raw = raw_config(family, TAPS, 2, block_size=7)
    tensors = {name: tensor.bfloat16().float() for name, tensor in random_tensors(raw).items()}
    mine, other, world = pair_of(load(tmp_path, raw, tensors), CHAIN)
    batch = world.batch(proposals=world.slots)
    tree, expected = mine.draft(batch), other.draft(batch)
    torch.testing.assert_close(tree.scores[:, :2], expected.scores[:, :2], atol=5e-2, rtol=0)
    assert (tree.token_ids[:, 1] == expected.token_ids[:, 1]).float().mean() >= 0.75


def test_float16_takes_torchs_operations(tmp_path):
    head = head_of(tmp_path, "dflash2", dtype=torch.float16)
    drafter, spec = OnePassDrafter(head, CHAIN), channel_spec(CHAIN, head.taps_size)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    assert drafter.passes is None


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="builds of x86 processors")
@pytest.mark.parametrize("march", BUILDS)
def test_builds_for_narrower_registers_draft_likewise(tmp_path, march, monkeypatch):
    if BUILDS[march] not in library._processor():
        pytest.skip(f"this processor has no {BUILDS[march]}")
    monkeypatch.setenv(library.ARCHITECTURE, march)
    kernels = CpuKernels(tmp_path / "library")

    def found():
        """Return the narrow build, unless kernels are switched off."""
        return None if cpu_kernels() is None else kernels

    for module in (kernel_passes, kernel_head, kernel_block, packed_linears):
        monkeypatch.setattr(module, "cpu_kernels", found)
    for number, family in enumerate(FAMILIES):
        for num_layers, speculation in ((1, TREE), (2, CHAIN), (5, replace(TREE, draft_steps=2))):
            head = head_of(tmp_path / f"{number}-{num_layers}", family, num_layers)
            assert_alike(*pair_of(head, speculation))
    assert_alike(*pair_of(parallel_head(tmp_path / "p-eagle", 2), TREE))
