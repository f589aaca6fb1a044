"""Mistakes that readers of one-pass heads make without any error, tested one by one."""

import torch

from tests.runtime.by_torch import by_torch
from tests.runtime.models import CHAIN
from tests.runtime.one_pass.one_pass_drafts import FULL, TAPS, fed, load, trees_of
from tests.runtime.one_pass.one_pass_world import HIDDEN, Reference, random_tensors, raw_config
from wingbeat.runtime.one_pass.config import LatticeConfig
from wingbeat.runtime.one_pass.convolution import GroupedConvolution


def committed(drafter, world):
    """Keys and values of every committed position, by layer, sequence after sequence."""
    index = [
        world.tables[slot, torch.arange(int(world.lens[slot]) - 1) // drafter.pool.block_size] * drafter.pool.block_size
        + torch.arange(int(world.lens[slot]) - 1) % drafter.pool.block_size
        for slot in world.slots
    ]
    return [cache.flatten(0, 1)[torch.cat(index)].clone() for pair in drafter.pool.caches for cache in pair]


def all_equal(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_the_input_norm_is_of_the_slots_and_not_of_the_context(tmp_path):
    raw = raw_config("dflash", TAPS, 2)
    tensors = random_tensors(raw)
    drafter, world = fed(load(tmp_path, raw, tensors), CHAIN)
    other = dict(tensors) | {"layers.0.input_layernorm.weight": tensors["layers.0.input_layernorm.weight"] * 2}
    changed, _ = fed(load(tmp_path, raw, other), CHAIN)
    assert all_equal(committed(drafter, world), committed(changed, world))
    assert not torch.equal(trees_of(drafter, world).scores, trees_of(changed, world).scores)


def test_the_layouts_differ_by_one_slot(tmp_path):
    """With equal weights and blocks, fill-in heads draft first what shifting heads draft second."""
    weights = random_tensors(raw_config("dflash", TAPS, 2))
    trees = []
    for family, steps in (("dflash", 4), ("dspark-none", 5)):
        shape = type(CHAIN)(steps, 1, 1 + steps)
        trees.append(trees_of(*fed(load(tmp_path, raw_config(family, TAPS, 2), weights), shape)).token_ids)
    fill_in, shift = trees
    assert torch.equal(fill_in[:, 1:], shift[:, 2:])
    assert not torch.equal(fill_in[:, 1:], shift[:, 1:-1])


def test_a_block_is_dropped(tmp_path):
    """Committed rows stay, and a sequence that has drafted drafts what one that never did drafts."""
    raw = raw_config("dflash", TAPS, 2, layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    tensors = random_tensors(raw)
    drafter, world = fed(load(tmp_path, raw, tensors), CHAIN)
    before = committed(drafter, world)
    first = trees_of(drafter, world)
    assert all_equal(before, committed(drafter, world))
    assert torch.equal(first.token_ids, trees_of(drafter, world).token_ids)
    fresh, _ = fed(load(tmp_path, raw, tensors), CHAIN)
    for each in (drafter, fresh):
        with torch.inference_mode():
            each.commit(world.batch(decodes=[(slot, int(world.lens[slot]) - 1, 1) for slot in world.slots]))
    world.lens[world.slots] += 1
    assert torch.equal(trees_of(drafter, world).scores, trees_of(fresh, world).scores)


def test_what_is_kept_does_not_depend_on_drafted_tokens(tmp_path):
    """A drafter that is told other tokens for the same taps keeps the same numbers."""
    raw = raw_config("dspark-vanilla", TAPS, 2)
    head = load(tmp_path, raw, random_tensors(raw))
    drafter, world = fed(head, CHAIN)
    before = committed(drafter, world)
    world.tokens = (world.tokens + 5) % 90
    with torch.inference_mode():
        world.feed(drafter)
    assert all_equal(before, committed(drafter, world))


def test_a_cached_prefix_serves_another_sequence(tmp_path):
    """Blocks that one sequence filled are context of another that brings only what follows."""
    raw = raw_config("dflash", TAPS, 2)
    tensors = random_tensors(raw)
    drafter, world = fed(load(tmp_path, raw, tensors), CHAIN)
    size = drafter.pool.block_size
    giver, taker = world.slots[3], next(slot for slot in range(len(world.lens)) if slot not in world.slots)
    shared = 3 * size
    world.tables[taker, :3] = world.tables[giver, :3]
    world.taps[taker, :shared] = world.taps[giver, :shared]
    world.lens[taker] = shared + 6
    with torch.inference_mode():
        drafter.commit(world.batch(chunks=[(taker, shared, 5)]))
        tree = drafter.propose(world.batch(proposals=[taker]))
    reference, length = Reference(raw, tensors, True, [FULL] * 2), int(world.lens[taker])
    anchor = int(world.tokens[taker, length - 1])
    hidden = reference.hidden(world.taps[taker, : length - 1], anchor)
    assert tree.token_ids[0, 1:].tolist() == reference.logits(hidden)[: CHAIN.draft_steps].argmax(-1).tolist()


def test_taps_of_the_next_layers_change_the_draft(tmp_path):
    raw = raw_config("dflash", TAPS, 2)
    tensors = random_tensors(raw)
    drafter, world = fed(load(tmp_path, raw, tensors), CHAIN)
    right = trees_of(drafter, world)
    world.taps = world.taps.roll(HIDDEN, dims=2)
    with torch.inference_mode():
        world.feed(drafter)
    assert not torch.equal(right.token_ids, trees_of(drafter, world).token_ids)
    off_by_one = load(tmp_path, raw_config("dflash", [layer + 1 for layer in TAPS], 2), tensors)
    assert off_by_one.config.tap_layers == tuple(layer + 1 for layer in drafter.needs.tap_layers) == (1, 4, 7)


def test_a_convolution_sees_nothing_before_the_block():
    """A request's slots do not read the request before it, and the first slot reads itself alone."""
    torch.manual_seed(0)
    conv = GroupedConvolution(HIDDEN, LatticeConfig(num_taps=3, group_size=8))
    for parameter in conv.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    blocks = torch.randn(2, 5, HIDDEN)
    together = conv.over(blocks, conv.kernels(blocks), 0)
    for index in range(2):
        alone = blocks[index : index + 1]
        torch.testing.assert_close(conv.over(alone, conv.kernels(alone), 0)[0], together[index])
    first = blocks[:, :1] * conv.kernels(blocks)[:, :1, 0, 0]
    torch.testing.assert_close(together[:, :1], first)


def test_the_sum_over_taps_may_be_beyond_float16(tmp_path):
    """fc's output is normed before it is rounded: the same direction at any scale."""
    raw = raw_config("dflash", TAPS, 2)
    tensors = random_tensors(raw)
    loud = dict(tensors) | {"fc.weight": tensors["fc.weight"] * 3e4}
    assert float((torch.randn(1000, loud["fc.weight"].shape[1]) @ loud["fc.weight"].T).abs().max()) > 65504
    taps = torch.randn(7, loud["fc.weight"].shape[1])
    vectors = load(tmp_path, raw, loud, torch.float16).fuse(taps.half())
    assert vectors.dtype == torch.float16
    expected = load(tmp_path, raw, tensors).fuse(taps)
    torch.testing.assert_close(vectors.float(), expected, atol=2e-2, rtol=2e-2)


def test_a_residual_stream_may_be_beyond_float16(tmp_path):
    """Every sublayer's output is within the range, and their sum is not."""
    raw = raw_config("dflash", TAPS, 5)
    tensors = random_tensors(raw)
    for name in tensors:
        if name.endswith(("mlp.down_proj.weight", "self_attn.o_proj.weight")):
            tensors[name] *= 1.5e4
    exact, world = by_torch(lambda: fed(load(tmp_path, raw, tensors), CHAIN))
    outputs, streams = [], []
    for layer in exact.head.layers:
        layer.o_proj.register_forward_hook(lambda module, args, out: outputs.append(float(out.abs().max())))
        layer.down_proj.register_forward_hook(lambda module, args, out: outputs.append(float(out.abs().max())))
        layer.register_forward_hook(lambda module, args, out: streams.append(float(out.abs().max())))
    expected = trees_of(exact, world).scores
    assert max(outputs) < 65504 < max(streams)
    half, _ = fed(load(tmp_path, raw, tensors, torch.float16), CHAIN)
    torch.testing.assert_close(trees_of(half, world).scores, expected, atol=0.1, rtol=0)


def test_a_head_in_bfloat16_drafts_about_the_same(tmp_path):
    raw = raw_config("dflash2", TAPS, 2)
    tensors = random_tensors(raw)
    exact, world = fed(load(tmp_path, raw, tensors), CHAIN)
    rounded, _ = fed(load(tmp_path, raw, tensors, torch.bfloat16), CHAIN)
    assert rounded.pool.caches[0][0].dtype == torch.bfloat16
    first = [trees_of(drafter, world).scores[:, 1] for drafter in (rounded, exact)]
    torch.testing.assert_close(*first, atol=0.1, rtol=0)
