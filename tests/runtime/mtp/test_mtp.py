"""MTP modules draft what their mathematics over full contexts drafts; through the engine the text is the verifier's."""

from dataclasses import replace

import pytest
import torch
from transformers.modeling_layers import MtpModel

from tests.runtime.draft_world import MIXED, NUM_SLOTS, SHAPES, World, channel_spec, watch_proposals
from tests.runtime.graphs.test_graph_runner import FakeDevice
from tests.runtime.models import (
    CHAIN,
    HIDDEN_SIZE,
    TREE,
    engine_config,
    generate,
    greedy,
    greedy_params,
    random_prompts,
)
from tests.runtime.mtp.mtp_world import NUM_LAYERS, Modules
from tests.runtime.slow_growth import assert_tree, slow_tree
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.mtp.mtp_drafter import MtpDrafter, build_mtp
from wingbeat.runtime.mtp.mtp_loader import load_mtp_modules
from wingbeat.runtime.verifier.loading.loader import load_model

pytestmark = pytest.mark.few(1)

DEEP = {"chain": replace(CHAIN, draft_steps=5), "tree": replace(TREE, draft_steps=5)}
"""Shapes deeper than the modules: the last levels run the last module again."""
CASES = [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1), ("glm4_moe", 2)]


def new_drafter(folder, speculation, graph_device=None):
    modules = load_mtp_modules(TargetDescription.from_checkpoint(folder))
    drafter = MtpDrafter(modules, speculation, NUM_LAYERS, graph_device)
    spec = channel_spec(speculation, HIDDEN_SIZE)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    return drafter


def check(tree, world, slots, modules, speculation, max_levels=None):
    for row, slot in enumerate(slots):
        length = int(world.lens[slot])
        tokens = world.tokens[slot, :length].tolist()
        logits_of = modules.logits_of(tokens, world.taps[slot, : length - 1])
        temperature, seed = float(world.temperatures[slot]), int(world.seeds[slot])
        assert_tree(tree, row, slow_tree(tokens, logits_of, speculation, temperature, seed, max_levels))


@pytest.mark.parametrize("temperatures", [(0.0,) * NUM_SLOTS, MIXED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculation", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("family", "count"), CASES, ids=[f"{family}-{count}" for family, count in CASES])
@torch.inference_mode()
def test_trees_equal_those_of_full_contexts(tmp_path, family, count, speculation, temperatures):
    """Unequal lengths, prompts in chunks; five drafted levels, three tokens accepted, five more."""
    modules = Modules.random(family, count)
    modules.save(tmp_path)
    drafter = new_drafter(tmp_path, speculation)
    world = World(speculation, HIDDEN_SIZE, (2, 9, 17, 40), temperatures)
    world.feed(drafter)
    for slots, tree in world.drafted_twice(drafter):
        check(tree, world, slots, modules, speculation)


@pytest.mark.slow
@pytest.mark.parametrize("speculation", DEEP.values(), ids=DEEP.keys())
@pytest.mark.parametrize("count", [4, 3, 2, 1])
@torch.inference_mode()
def test_modules_look_further_ahead_than_sequences_are_long(tmp_path, count, speculation):
    """Chunks of one to five tokens and a decided one, on hosts and captured: later modules have no first rows, and
    nobody sees what lies in their place."""
    modules = Modules.random("qwen3", count)
    modules.save(tmp_path)
    drafters = [new_drafter(tmp_path, speculation, device) for device in (None, FakeDevice())]
    for drafter in drafters:
        for part in (*(part for pair in drafter.pool.caches for part in pair), *drafter.pool.extras):
            part.fill_(50.0)  # as if somebody else's were there
        world = World(speculation, HIDDEN_SIZE, (2, 3, 4, 5, 6), MIXED)
        world.feed(drafter)
        slots = world.slots
        check(drafter.propose(world.batch(proposals=slots)), world, slots, modules, speculation)
        decodes = [(slot, int(world.lens[slot]) - 1, 1 + index % 2) for index, slot in enumerate(slots)]
        for slot, _, more in decodes:
            world.lens[slot] += more
        check(drafter.draft(world.batch(decodes=decodes, proposals=slots)), world, slots, modules, speculation)


@pytest.mark.parametrize("count", [1, 2])
@torch.inference_mode()
def test_a_shared_prefix_is_not_run_again(tmp_path, count):
    """Results of the first module behind which the second one goes on lie under the blocks, like keys and values."""
    modules = Modules.random("glm4_moe", count)
    modules.save(tmp_path)
    drafter = new_drafter(tmp_path, TREE)
    world = World(TREE, HIDDEN_SIZE, (13, 14))
    first, second = world.slots
    world.tokens[second, :11] = world.tokens[first, :11]
    world.taps[second, :8] = world.taps[first, :8]
    world.tables[second, :2] = world.tables[first, :2]
    drafter.commit(world.batch(chunks=[(first, 0, 12)]))
    drafter.commit(world.batch(chunks=[(second, 8, 5)]))
    slots = [second, first]
    check(drafter.propose(world.batch(proposals=slots)), world, slots, modules, TREE)


@torch.inference_mode()
def test_a_pass_may_hold_chunks_and_decodes_of_one_sequence(tmp_path):
    """As where pairs were kept back: the decode behind the chunk has the last word."""
    modules = Modules.random("deepseek_v3", 2)
    modules.save(tmp_path)
    drafter = new_drafter(tmp_path, CHAIN)
    world = World(CHAIN, HIDDEN_SIZE, (9, 17))
    begun, decoding = world.slots
    drafter.commit(world.batch(chunks=[(decoding, 0, 10)]))
    batch = world.batch(
        decodes=[(decoding, 14, 2)],
        chunks=[(decoding, 10, 4), (begun, 0, 8)],
        proposals=[begun, decoding],
        max_levels=3,
    )
    check(drafter.draft(batch), world, [begun, decoding], modules, CHAIN, max_levels=3)


@torch.inference_mode()
def test_growing_keeps_what_is_stored(tmp_path):
    modules = Modules.random("glm4_moe", 2)
    modules.save(tmp_path)
    drafter = new_drafter(tmp_path, TREE)
    world = World(TREE, HIDDEN_SIZE, (9, 17))
    world.feed(drafter)
    spec = channel_spec(TREE, HIDDEN_SIZE)
    drafter.resize(spec, 2 * spec.num_slots, 2 * spec.num_blocks)
    check(drafter.propose(world.batch(proposals=world.slots)), world, world.slots, modules, TREE)
    with pytest.raises(ValueError, match="taps of size 128: its modules need 64"):
        drafter.resize(channel_spec(TREE, 128), 1, 1)


@torch.inference_mode()
def taps_of(loaded, tokens):
    """Inputs of the verifier's output matrix, at every position."""
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    hidden = loaded.model.model(torch.tensor([tokens])).last_hidden_state[0]
    loaded.model.set_attn_implementation(before)
    return hidden


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("family", "count"), [("deepseek_v3", 1), ("glm4_moe", 2)])
def test_the_engine_feeds_modules_what_they_are_made_for(tmp_path, family, count, speculation):
    """Every tree of a run equals the one computed from the verifier's own hidden states; the text is generate()'s."""
    modules = Modules.random(family, count)
    modules.save(tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"))
    target = TargetDescription.from_checkpoint(tmp_path)
    drafter = build_mtp("mtp", target, speculation, DrafterOptions())
    seen = watch_proposals(drafter)
    prompts = random_prompts((5, 17, 3))
    tokens, engine = generate(loaded, engine_config(speculation), drafter, prompts, greedy_params(24))
    assert tokens == greedy(loaded.model, prompts, 24)[0]
    assert engine.speculation.num_drafts == len(seen) > 30
    with torch.inference_mode():
        for history, tree in seen[::7]:
            logits_of = modules.logits_of(history, taps_of(loaded, history)[:-1])
            assert_tree(tree, 0, slow_tree(history, logits_of, speculation))


@pytest.mark.parametrize("count", [1, 2])
@torch.inference_mode()
def test_transformers_own_modules_agree(tmp_path, count):
    """Order of the inputs, norms, positions, and what is fed back are as in transformers' MTP modules."""
    modules = Modules.random("glm4_moe", count)
    modules.save(tmp_path)
    ours = load_mtp_modules(TargetDescription.from_checkpoint(tmp_path))
    main = load_model(tmp_path, torch.float32, torch.device("cpu")).model
    main.set_attn_implementation("eager")
    theirs = MtpModel(main, count).eval()
    for module, mine in zip(theirs.layers, ours.items, strict=True):
        names = {"mtp_block": "block", "post_norm": "norm"}
        for part in ("enorm", "hnorm", "eh_proj", *names):
            getattr(module, part).load_state_dict(getattr(mine, names.get(part, part)).state_dict())
    tokens = random_prompts((12,))[0]
    taps = taps_of(load_model(tmp_path, torch.float32, torch.device("cpu")), tokens)[:-1]
    drafted, logits, _ = theirs(
        input_ids=torch.tensor([tokens[1:]]),
        last_hidden_states=taps[None],
        attention_mask=torch.ones(1, len(tokens) - 1, dtype=torch.int64),
        position_ids=torch.arange(1, len(tokens))[None],
        mtp_cache=None,
    )
    logits_of, path = modules.logits_of(tokens, taps), []
    for depth in range(count):
        torch.testing.assert_close(logits_of(path), logits[0, depth], atol=1e-4, rtol=1e-4)
        path.append(int(drafted[0, depth]))
