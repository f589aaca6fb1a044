"""An EAGLE drafter's pass by the CPU's kernels drafts what torch's operations draft, and answers a channel alike."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runtime.draft_world import MIXED, NUM_SLOTS, SHAPES, VOCAB, World, channel_spec
from tests.runtime.models import random_head, reference
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import NUM_BINS, SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.protocol.messages import RoundHeader
from wingbeat.runtime.speculation.policy import GrowthLimits, GrowthRule
from wingbeat.runtime.verifier.layers.cpu_kernels import cpu_kernels, use_kernels

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
    assert drafter._passes is not None
    return drafter


@pytest.fixture
def by_torch():
    """Runs a function without the kernels."""

    def run(function):
        before = use_kernels(False)
        try:
            return function()
        finally:
            use_kernels(before)

    return run


def assert_same(tree, expected):
    for name in ("token_ids", "parents", "depths", "num_valid"):
        assert getattr(tree, name).tolist() == getattr(expected, name).tolist(), name
    torch.testing.assert_close(tree.scores, expected.scores, atol=2e-5, rtol=0)


def worlds(drafter, temperatures, by_torch):
    """The sequences, fed to the drafter, and to another one like it by torch's operations."""
    world = World(drafter.speculation, drafter.head.taps_size, LENS, temperatures)
    world.feed(drafter)
    other = EagleDrafter(drafter.head, drafter.speculation)
    spec = channel_spec(drafter.speculation, drafter.head.taps_size)
    other.resize(spec, spec.num_slots, spec.num_blocks)
    by_torch(lambda: world.feed(other))
    return world, other


@pytest.mark.parametrize("temperatures", [GREEDY, MIXED], ids=["greedy", "sampled"])
@by_shape
@torch.inference_mode()
def test_trees_hidden_states_and_keys_are_those_of_torch(speculation, temperatures, by_torch):
    drafter = drafter_of(speculation)
    world, other = worlds(drafter, temperatures, by_torch)
    torch.testing.assert_close(drafter._hidden, other._hidden, atol=2e-5, rtol=1e-5)
    for mine, expected in zip(drafter.pool.caches[0], other.pool.caches[0], strict=True):
        committed = drafter.pool.num_blocks
        torch.testing.assert_close(mine[1:committed], expected[1:committed], atol=2e-5, rtol=1e-5)
    for depth in {1, 2, speculation.max_path - 1}:
        if depth < speculation.max_path:
            batch = world.batch(proposals=world.slots, max_levels=depth)
            assert_same(drafter.draft(batch), by_torch(lambda batch=batch: other.draft(batch)))


@by_shape
@torch.inference_mode()
def test_a_head_of_two_bytes_drafts_as_its_numbers_in_float32_do(speculation):
    """Sums are float32: what is rounded are the weights, the angles, and keys and values where they are stored."""
    drafter = drafter_of(speculation, torch.bfloat16)
    wide = EagleDrafter(copy.deepcopy(drafter.head).float(), speculation)
    spec = channel_spec(speculation, wide.head.taps_size)
    wide.resize(spec, spec.num_slots, spec.num_blocks)
    world = World(speculation, wide.head.taps_size, LENS, GREEDY)
    for one in (drafter, wide):
        world.feed(one)
    torch.testing.assert_close(drafter._hidden, wide._hidden, atol=5e-2, rtol=5e-2)
    batch = world.batch(proposals=world.slots, max_levels=1)
    tree, expected = drafter.draft(batch), wide.draft(batch)
    torch.testing.assert_close(tree.scores[:, :2], expected.scores[:, :2], atol=5e-2, rtol=5e-2)
    alike = (tree.token_ids[:, 1] == expected.token_ids[:, 1]).float().mean()
    assert alike >= 0.75


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_output": True},
        {"norm_before_residual": True},
        {"fc_norm": True, "fc_bias": True},
        {"norm_before_fc": True, "norm_output": True},
        {"qk_norm": True, "attention_bias": True, "output_bias": True},
    ],
    ids=", ".join,
)
@torch.inference_mode()
def test_a_head_is_read_as_it_is_read_by_torch(fields, by_torch):
    drafter = drafter_of(ALL_SHAPES["tree"], **fields)
    world, other = worlds(drafter, GREEDY, by_torch)
    batch = world.batch(proposals=world.slots)
    assert_same(drafter.draft(batch), by_torch(lambda: other.draft(batch)))


@by_shape
@torch.inference_mode()
def test_growth_ends_where_the_rules_end_it(speculation, by_torch):
    drafter = drafter_of(speculation)
    world, other = worlds(drafter, MIXED, by_torch)
    table = np.linspace(0.05, 0.95, NUM_BINS, dtype=np.float32)
    deepest = set()
    for min_reach in (0.0, 0.05, 0.3, 1.0, 3.0, 9.0):

        def rules(min_reach=min_reach):
            """Fresh ones for every draft: they follow its paths."""
            halves = (slice(0, 3), slice(3, len(world.slots)))
            limits = GrowthLimits(min_reach, 0.02)
            made = [GrowthRule(limits, np.tile(table, (half.stop - half.start, 1))) for half in halves]
            return tuple(zip(halves, made, strict=True))

        batch = world.batch(proposals=world.slots)
        tree = drafter.draft(batch._replace(growth_rules=rules()))
        assert_same(tree, by_torch(lambda batch=batch, rules=rules: other.draft(batch._replace(growth_rules=rules()))))
        deepest.add(int(tree.depths.max()))
    assert len(deepest) > 1 or speculation.max_path == 2


@by_shape
@torch.inference_mode()
def test_roots_are_followed_by_allowed_tokens_alone(speculation, by_torch):
    drafter = drafter_of(speculation)
    world, other = worlds(drafter, MIXED, by_torch)
    words = -(-VOCAB // 32)
    allowed = torch.randint(-(1 << 31), 1 << 31, (len(world.slots), words)).to(torch.int32)
    allowed[1] = 0  # nothing that the head knows: all of it stays
    batch = world.batch(proposals=world.slots)._replace(allowed_tokens=allowed)
    assert_same(drafter.draft(batch), by_torch(lambda: other.draft(batch)))


@pytest.mark.parametrize("with_rule", [False, True], ids=["whole", "rule"])
@by_shape
@torch.inference_mode()
def test_a_channels_round_is_answered_as_it_is_drafted(speculation, with_rule, monkeypatch):
    drafters = [drafter_of(speculation) for _ in range(2)]
    monkeypatch.setattr(drafters[1], "answer", lambda end, outcome: False)
    replies = [_reply(drafter, with_rule) for drafter in drafters]
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
    """Addresses follow from these numbers, which are another process's word."""

    def spoil(outcome):
        name, _, index = place.partition(" ")
        getattr(outcome, name).view(-1)[int(index or 0)] = value

    with pytest.raises(ValueError, match="a round names what its channel has not"):
        _reply(drafter_of(ALL_SHAPES["tree"]), False, spoil)


def _reply(drafter, with_rule, spoil=lambda outcome: None):
    """To a round of a chunk, two decodes, and trees of all three."""
    channel = InProcessChannel(channel_spec(drafter.speculation, drafter.head.taps_size))
    worker = DraftWorker(drafter)
    worker.attach("only", channel.attach(2))
    end, generator = channel.verifier_end, torch.Generator().manual_seed(1)
    outcome = end.acquire_outcome(1.0)
    for field in (outcome.decode_token_ids, outcome.chunk_next_token_ids, end.token_ids):
        field.copy_(torch.randint(0, VOCAB, field.shape, generator=generator))
    for field in (outcome.decode_taps, outcome.chunk_taps):
        field.copy_(torch.randn(field.shape, generator=generator))
    outcome.block_tables.copy_(1 + torch.arange(outcome.block_tables.numel()).view_as(outcome.block_tables))
    outcome.chunk_slots[0], outcome.chunk_positions[0], outcome.chunk_lens[0] = 2, 0, 7
    outcome.decode_slots[:2], outcome.decode_positions[:2] = torch.tensor([0, 1]), 0
    outcome.decode_num_tokens[:2] = torch.tensor([1, 2])
    outcome.proposal_slots[:3] = torch.tensor([2, 0, 1])
    outcome.committed_lens[:3] = torch.tensor([2, 3, 8])
    outcome.epochs.copy_(torch.arange(NUM_SLOTS))
    outcome.temperatures.copy_(torch.tensor(MIXED))
    outcome.growth_limits.copy_(torch.tensor([0.2, 0.02]))
    outcome.acceptance_table.copy_(torch.linspace(0.1, 0.9, 2 * NUM_BINS).view(2, -1))
    RoundHeader(0, 2, 1, 3, drafter.speculation.max_path - 1, 8, int(with_rule)).write(outcome.header)
    spoil(outcome)
    round_number = end.publish_outcome()
    assert worker.run_once()
    return end.wait_reply(round_number, 1.0)


@torch.inference_mode()
def test_threads_that_are_tried_change_no_tree():
    drafter = drafter_of(ALL_SHAPES["tree"])
    world = World(drafter.speculation, drafter.head.taps_size, LENS, MIXED)
    world.feed(drafter)
    batch = world.batch(proposals=world.slots)
    alone = drafter.draft(batch)
    drafter.try_threads(2)
    assert drafter._passes.num_threads in (1, 2)
    drafter._passes.num_threads = 2
    together = drafter.draft(batch)
    assert all(torch.equal(mine, other) for mine, other in zip(alone, together, strict=True))
    cpu_kernels().use_threads(1)
