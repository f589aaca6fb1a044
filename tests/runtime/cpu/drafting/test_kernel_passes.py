"""An EAGLE drafter on the CPU's kernels drafts what torch's operations draft, directly and through a channel."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.runtime.by_torch import by_torch
from tests.runtime.cpu.drafting.kernel_drafts import WITH_RULE, assert_same, reply_of
from tests.runtime.draft_world import MIXED, NUM_SLOTS, SHAPES, World, channel_spec
from tests.runtime.models import random_head, reference
from wingbeat.kernels.cpu.group_panels import GroupPanels
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.cpu.layers import packed_linears
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.heads.eagle3 import EagleHead

pytestmark = [
    pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler"),
]

ALL_SHAPES = SHAPES | {"two-words": SpeculationConfig(10, 8, 40)}
LENS = (2, 9, 17, 40, 5, 8, 33, 24)
by_shape = pytest.mark.parametrize("speculation", ALL_SHAPES.values(), ids=ALL_SHAPES.keys())
GREEDY = (0.0,) * NUM_SLOTS


def drafter_of(speculation, dtype=torch.float32, **fields):
    head = random_head(reference("llama").loaded, draft_vocab_size=48)
    if fields:
        torch.manual_seed(4)
        head = EagleHead(replace(head.config, **fields))
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    drafter = EagleDrafter(head.eval().to(dtype), speculation)
    spec = channel_spec(speculation, head.taps_size)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    assert drafter.passes is not None
    return drafter


def worlds(drafter, temperatures):
    """Sequences that were fed to the drafter, and a second drafter of the same head on torch's operations."""
    world = World(drafter.speculation, drafter.head.taps_size, LENS, temperatures)
    world.feed(drafter)
    other = EagleDrafter(drafter.head, drafter.speculation)
    spec = channel_spec(drafter.speculation, drafter.head.taps_size)
    by_torch(lambda: other.resize(spec, spec.num_slots, spec.num_blocks))
    assert other.passes is None
    world.feed(other)
    return world, other


@pytest.mark.parametrize("temperatures", [GREEDY, MIXED], ids=["greedy", "sampled"])
@by_shape
@torch.inference_mode()
def test_trees_hidden_states_and_keys_are_those_of_torch(speculation, temperatures):
    drafter = drafter_of(speculation)
    world, other = worlds(drafter, temperatures)
    torch.testing.assert_close(drafter.hidden, other.hidden, atol=2e-5, rtol=1e-5)
    for mine, expected in zip(drafter.pool.caches[0], other.pool.caches[0], strict=True):
        committed = drafter.pool.num_blocks
        torch.testing.assert_close(mine[1:committed], expected[1:committed], atol=2e-5, rtol=1e-5)
    for depth in {1, 2, speculation.max_path - 1}:
        if depth < speculation.max_path:
            batch = world.batch(proposals=world.slots, max_levels=depth)
            assert_same(drafter.draft(batch), other.draft(batch))


@by_shape
@torch.inference_mode()
def test_a_head_of_two_bytes_drafts_as_its_numbers_in_float32_do(speculation):
    """Sums are in float32 either way; rounded are the weights, the rotary angles, and the stored keys and values."""
    drafter = drafter_of(speculation, torch.bfloat16)
    wide = EagleDrafter(copy.deepcopy(drafter.head).float(), speculation)
    spec = channel_spec(speculation, wide.head.taps_size)
    wide.resize(spec, spec.num_slots, spec.num_blocks)
    world = World(speculation, wide.head.taps_size, LENS, GREEDY)
    for one in (drafter, wide):
        world.feed(one)
    torch.testing.assert_close(drafter.hidden, wide.hidden, atol=5e-2, rtol=5e-2)
    batch = world.batch(proposals=world.slots, max_levels=1)
    tree, expected = drafter.draft(batch), wide.draft(batch)
    torch.testing.assert_close(tree.scores[:, :2], expected.scores[:, :2], atol=5e-2, rtol=5e-2)
    alike = (tree.token_ids[:, 1] == expected.token_ids[:, 1]).float().mean()
    assert alike >= 0.75


@torch.inference_mode()
def test_a_rounded_head_drafts_nearly_what_its_numbers_draft(monkeypatch):
    speculation = ALL_SHAPES["tree"]
    wide = drafter_of(speculation)
    monkeypatch.setattr(packed_linears, "_LEAST_ROUNDED", 32)
    rounded = drafter_of(speculation)
    assert any(isinstance(getattr(one, "panels", None), GroupPanels) for one in rounded.head.modules())
    world = World(speculation, wide.head.taps_size, LENS, GREEDY)
    for one in (rounded, wide):
        world.feed(one)
    torch.testing.assert_close(rounded.hidden, wide.hidden, atol=0.2, rtol=0)
    batch = world.batch(proposals=world.slots, max_levels=1)
    tree, expected = rounded.draft(batch), wide.draft(batch)
    torch.testing.assert_close(tree.scores[:, :2], expected.scores[:, :2], atol=0.2, rtol=0)
    assert (tree.token_ids[:, 1] == expected.token_ids[:, 1]).float().mean() >= 0.75


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_output": True},
        {"norm_before_residual": True},
        {"fc_norm": True, "fc_bias": True},
        {"norm_before_fc": True, "norm_output": True},
        {"qk_norm": True, "attention_bias": True, "output_bias": True},
        {"num_layers": 2},
        {"num_layers": 3, "qk_norm": True, "rotary_dim": 6, "norm_output": True},
    ],
    ids=", ".join,
)
@torch.inference_mode()
def test_a_head_is_read_as_it_is_read_by_torch(fields):
    drafter = drafter_of(ALL_SHAPES["tree"], **fields)
    world, other = worlds(drafter, GREEDY)
    batch = world.batch(proposals=world.slots)
    assert_same(drafter.draft(batch), other.draft(batch))


@WITH_RULE
@by_shape
@torch.inference_mode()
def test_a_channels_round_is_answered_as_it_is_drafted(speculation, with_rule, monkeypatch):
    drafters = [drafter_of(speculation) for _ in range(2)]
    monkeypatch.setattr(drafters[1], "answer", lambda end, outcome: False)
    replies = [reply_of(drafter, with_rule) for drafter in drafters]
    for name in ("epochs", "committed_lens", "num_valid"):
        assert torch.equal(getattr(replies[0], name), getattr(replies[1], name)), name
    for row, count in enumerate(replies[0].num_valid[:3].tolist()):
        for name in ("token_ids", "parents", "depths"):
            mine, expected = (getattr(reply, name)[row, :count].tolist() for reply in replies)
            assert mine == expected, name
        torch.testing.assert_close(*(reply.scores[row, :count] for reply in replies), atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [-1, 1 << 40])
@pytest.mark.parametrize(
    "place",
    [
        *(f"header {index}" for index in (1, 2, 3)),
        *("decode_slots", "chunk_slots", "proposal_slots", "chunk_lens", "decode_num_tokens", "decode_positions"),
        *("chunk_positions", "block_tables"),
    ],
)
def test_a_round_that_names_what_its_channel_has_not_is_refused(place, value):
    """Memory addresses are computed from these numbers, which another process has written."""

    def spoil(outcome):
        name, _, index = place.partition(" ")
        getattr(outcome, name).view(-1)[int(index or 0)] = value

    with pytest.raises(ValueError, match="a round refers to slots or positions outside its channel"):
        reply_of(drafter_of(ALL_SHAPES["tree"]), False, spoil)


@torch.inference_mode()
def test_threads_that_are_tried_change_no_tree():
    drafter = drafter_of(ALL_SHAPES["tree"])
    world = World(drafter.speculation, drafter.head.taps_size, LENS, MIXED)
    world.feed(drafter)
    batch = world.batch(proposals=world.slots)
    alone = drafter.draft(batch)
    drafter.try_threads(2)
    assert drafter.passes.num_threads in (1, 2)
    drafter.passes.num_threads = 2
    together = drafter.draft(batch)
    assert all(torch.equal(mine, other) for mine, other in zip(alone, together, strict=True))
    cpu_kernels().use_threads(1)
