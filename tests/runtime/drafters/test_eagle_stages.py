"""An EAGLE drafter's fixed-shape drafts, captured or not, equal its drafts on the host at every batch and depth.

A captured stage is replayed on the CPU by a device that remembers the function and runs it on its static buffers.
"""

import logging
from dataclasses import replace

import pytest
import torch

from tests.near_ties import check_same_trees
from tests.runtime.draft_world import BLOCK_SIZE, MAX_LEN, MIXED, NUM_SLOTS, SHAPES, World, channel_spec
from tests.runtime.graphs.test_graph_runner import FakeDevice
from tests.runtime.models import CHAIN, TREE, random_head, reference
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.protocol.messages import TokenTree

LENS = (2, 9, 17, 40, 1 + BLOCK_SIZE, 2 * BLOCK_SIZE, 33, MAX_LEN)
ALL_SHAPES = SHAPES | {"two-words": SpeculationConfig(10, 8, 40)}
GREEDY = (0.0,) * NUM_SLOTS

by_shape = pytest.mark.parametrize("speculation", ALL_SHAPES.values(), ids=ALL_SHAPES.keys())


def new_drafter(speculation, graph_device=None, fixed_shapes=False, device="cpu"):
    head = random_head(reference("llama").loaded, draft_vocab_size=48).to(device)
    drafter = EagleDrafter(head, speculation, graph_device)
    drafter.fixed_shapes |= fixed_shapes
    spec = channel_spec(speculation, head.fc.in_features)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    return drafter


def new_world(drafter, temperatures=MIXED):
    return World(drafter.speculation, drafter.head.fc.in_features, LENS, temperatures)


def assert_same(tree, expected, tolerance=1e-5):
    check_same_trees(tree, expected, tolerance)


def a_round(world, slots, depth, device="cpu"):
    """A batch that commits the last pairs of some sequences and requests a tree for each of them."""
    decodes = [(slot, int(world.lens[slot]) - 1 - count, count) for slot in slots for count in [1 + slot % 2]]
    decodes = [decode for decode in decodes if decode[1] >= 0]
    return world.batch(decodes=decodes, proposals=slots, max_levels=depth, device=device)


@pytest.mark.few(1)
@pytest.mark.parametrize("temperatures", [GREEDY, MIXED], ids=["greedy", "sampled"])
@by_shape
@torch.inference_mode()
def test_fixed_shapes_draft_the_trees_of_the_host(speculation, temperatures):
    today = new_drafter(speculation)
    staged = [new_drafter(speculation, fixed_shapes=True), new_drafter(speculation, FakeDevice())]
    world = new_world(today, temperatures)
    for drafter in (today, *staged):
        world.feed(drafter)
    deepest, num_trees = speculation.max_path - 1, 0
    for count in (1, 3, 8):
        slots = world.slots[-count:]
        for depth in {1, 2, deepest} & set(range(1, deepest + 1)):
            batch = a_round(world, slots, depth)
            expected = today.draft(batch)
            for drafter in staged:
                assert_same(drafter.draft(batch), expected)
            num_trees += 1
    eager, captured = (drafter.graph_stats for drafter in staged)
    assert eager is None
    assert not captured.eager_runs
    assert captured.replays == {Stage.DRAFT_PROPOSAL: num_trees, Stage.DRAFT_ACCEPT: 1, Stage.DRAFT_PREFILL: 2}


@pytest.mark.few(1)
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@torch.inference_mode()
def test_prompts_decodes_and_trees_share_a_pass(speculation):
    """A sequence's first tree follows its last prompt chunk, beside one that decodes and one that only decodes."""
    drafters = [new_drafter(speculation), new_drafter(speculation, FakeDevice())]
    trees = []
    for drafter in drafters:
        world = new_world(drafter)
        short, decoding, ending = world.slots[1], world.slots[2], world.slots[3]
        lens = world.lens.tolist()
        chunks = [(slot, 0, lens[slot] - 3) for slot in (decoding, ending)]
        assert drafter.draft(world.batch(chunks=chunks)) is None
        assert drafter.draft(world.batch(decodes=[(ending, lens[ending] - 3, 1)])) is None
        batch = world.batch(
            decodes=[(decoding, lens[decoding] - 3, 2), (ending, lens[ending] - 2, 1)],
            chunks=[(short, 0, lens[short] - 1)],
            proposals=[short, decoding],
        )
        trees.append(drafter.draft(batch))
        again = drafter.propose(world.batch(proposals=[ending]))
        trees[-1] = [part.clone() for part in (*trees[-1], *again)]
    for mine, expected in zip(trees[1], trees[0], strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@by_shape
@torch.inference_mode()
def test_padding_and_drafted_pairs_touch_nothing_committed(speculation):
    """Three of four rows: committed KV, other sequences' blocks and hidden states stay as they are."""
    drafter = new_drafter(speculation, FakeDevice())
    world = new_world(drafter)
    world.feed(drafter)
    slots = world.slots[2:5]
    before = [part.clone() for part in (*drafter.pool.caches[0], drafter.hidden)]
    tree = drafter.draft(world.batch(proposals=slots))
    committed = torch.zeros(before[0].shape[0] * BLOCK_SIZE, dtype=torch.bool)
    for slot in range(NUM_SLOTS):
        stored = world.lens[slot] - 1 if slot in slots else world.tables.shape[1] * BLOCK_SIZE
        index = torch.arange(int(stored))
        committed[world.tables[slot, index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE] = True
    for old, new in zip(before[:2], drafter.pool.caches[0], strict=True):
        assert torch.equal(old.flatten(0, 1)[committed], new.flatten(0, 1)[committed])
    assert torch.equal(before[2][:NUM_SLOTS], drafter.hidden[:NUM_SLOTS])
    assert_same(drafter.draft(world.batch(proposals=slots)), tree)


@torch.inference_mode()
def test_a_long_sequence_does_not_need_the_verifiers_scratch_slots():
    """Trees keep their depth and width where the block table ends with the sequence."""
    speculation = SpeculationConfig(6, 8, 16)
    today, staged = new_drafter(speculation), new_drafter(speculation, fixed_shapes=True)
    world = new_world(today)
    assert (speculation.max_path - 2) * speculation.draft_top_k > (world.tables.shape[1] * BLOCK_SIZE - MAX_LEN)
    for drafter in (today, staged):
        world.feed(drafter)
    batch = world.batch(proposals=world.slots)
    assert_same(staged.draft(batch), today.draft(batch))


@torch.inference_mode()
def test_addresses_stay():
    drafter = new_drafter(TREE, FakeDevice())
    world = new_world(drafter)
    world.feed(drafter)
    state = [part.data_ptr() for part in (*drafter.pool.caches[0], drafter.hidden)]
    trees = [drafter.draft(a_round(world, world.slots[:3], 4)) for _ in range(3)]
    assert len({tuple(part.data_ptr() for part in tree) for tree in trees}) == 1
    assert state == [part.data_ptr() for part in (*drafter.pool.caches[0], drafter.hidden)]
    assert all(tree.token_ids.shape == (3, TREE.num_nodes) for tree in trees)


@pytest.mark.slow
@torch.inference_mode()
def test_a_capture_that_fails_drafts_eagerly(caplog):
    with caplog.at_level(logging.WARNING):
        drafter = new_drafter(CHAIN, FakeDevice(failing=lambda capture: capture % 5 == 0))
    today = new_drafter(CHAIN)
    world = new_world(today)
    for each in (drafter, today):
        world.feed(each)
    for depth in range(1, CHAIN.max_path):
        batch = a_round(world, world.slots[:2], depth)
        assert_same(drafter.draft(batch), today.draft(batch))
    stats = drafter.graph_stats
    assert len(caplog.messages) == len(stats.failed) > 0
    assert all("runs eagerly" in message for message in caplog.messages)
    assert stats.eager_runs[Stage.DRAFT_PROPOSAL] > 0
    assert stats.replays[Stage.DRAFT_PROPOSAL] > 0


@pytest.mark.slow
@torch.inference_mode()
def test_room_for_another_verifier_keeps_what_is_stored():
    device = FakeDevice()
    drafter, today = new_drafter(TREE, device), new_drafter(TREE)
    world = new_world(today)
    for each in (drafter, today):
        world.feed(each)
    spec, num_captures = channel_spec(TREE, world.taps_size), device.num_captures
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    drafter.resize(replace(spec, num_slots=1, num_blocks=1), 1, 1)
    assert device.num_captures == num_captures
    drafter.resize(spec, spec.num_slots + 3, 2 * spec.num_blocks)
    assert device.num_captures > num_captures
    batch = a_round(world, world.slots[:5], None)
    assert_same(drafter.draft(batch), today.draft(batch))


@torch.inference_mode()
def test_a_verifier_with_other_blocks_starts_afresh():
    """Contents of blocks of another size are dropped."""
    drafter = new_drafter(CHAIN, fixed_shapes=True)
    spec = channel_spec(CHAIN, drafter.head.fc.in_features)
    other = replace(spec, block_size=8, max_blocks_per_seq=12, num_blocks=30)
    drafter.resize(other, 2, 30)
    assert drafter.pool.caches[0][0].shape[:2] == (30 + NUM_SLOTS, 8)
    world, fresh = new_world(drafter), EagleDrafter(drafter.head, CHAIN)
    fresh.resize(other, NUM_SLOTS, 30)
    world.tables, slot = 1 + torch.arange(NUM_SLOTS * 12).view(NUM_SLOTS, 12) % 12, world.slots[0]
    world.lens[slot] = 12
    batch = world.batch(chunks=[(slot, 0, 11)], proposals=[slot])
    assert_same(drafter.draft(batch), fresh.draft(batch))


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@by_shape
@torch.inference_mode()
def test_a_gpu_drafts_the_trees_of_the_cpu_and_nobody_waits(speculation, captured):
    cuda = torch.device("cuda", 0)
    today = new_drafter(speculation)
    graph_device = CudaGraphDevice(cuda) if captured else None
    drafter = new_drafter(speculation, graph_device, device=cuda)
    world = new_world(today)
    world.feed(today)
    world.feed(drafter, cuda)
    batch = a_round(world, world.slots[:5], None, cuda)
    drafter.draft(batch)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drafter.draft(batch)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for count in (1, 3, 8):
        for depth in range(1, speculation.max_path):
            tree = drafter.draft(a_round(world, world.slots[:count], depth, cuda))
            expected = today.draft(a_round(world, world.slots[:count], depth))
            assert_same(TokenTree(*(part.cpu() for part in tree)), expected, 1e-3)
    stats = drafter.graph_stats
    assert (stats is not None) == captured
    assert stats is None or (stats.replays and not stats.failed)
