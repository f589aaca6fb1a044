"""Heads that draft a block in one pass draft what their mathematics says: chains, trees, and every mask and layout."""

from dataclasses import replace

import pytest
import torch

from tests.near_ties import ROUNDING
from tests.runtime.draft_world import NUM_SLOTS
from tests.runtime.models import CHAIN, TREE
from tests.runtime.one_pass.one_pass_drafts import CAUSAL, FULL, TAPS, TARGET, fed, load, trees_of
from tests.runtime.one_pass.one_pass_world import FAMILIES, VOCAB, Reference, random_tensors, raw_config, save_head
from tests.runtime.one_pass.parallel_eagle_world import ParallelReference, parallel_config, parallel_tensors
from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.one_pass.load import read_one_pass_checkpoint
from wingbeat.runtime.one_pass.one_pass_drafter import OnePassDrafter, ParallelEagleDrafter
from wingbeat.runtime.one_pass.parallel_eagle import load_parallel_head

SHIFTED = {name for name in FAMILIES if name.startswith("dspark") and name != "dspark-fill-in"}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
MASKS = {
    "full": ({}, [FULL, FULL]),
    "causal": ({"is_causal": True}, [CAUSAL, CAUSAL]),
    "causal in the family's part": ({"dflash_config": {"causal": True}}, [CAUSAL, CAUSAL]),
    "sliding layers are causal": (SLIDING, [(True, 5), FULL]),
    "sliding layers that are not": (SLIDING | {"is_causal": False}, [(False, 5), FULL]),
    "speculators' sliding layers that are not": (SLIDING | {"sliding_window_non_causal": True}, [(False, 5), FULL]),
    "all slide": ({"dflash_config": {"use_swa": True, "swa_window_size": 7}}, [(False, 7), (False, 7)]),
    "a window within the block": (SLIDING | {"sliding_window": 2}, [(True, 2), FULL]),
}


def paths(tree, row):
    """Tokens from the root to each drafted node, and the node's log-probability given its parent."""
    for node in range(1, int(tree.num_valid[row])):
        path, at = [], node
        while at >= 0:
            path.insert(0, int(tree.token_ids[row, at]))
            at = int(tree.parents[row, at])
        yield path, float(tree.scores[row, node] - tree.scores[row, int(tree.parents[row, node])])


def assert_as(reference, drafter, world, tolerance=ROUNDING):
    """Every node has the reference's probability, and each first child is the likeliest token."""
    tree = trees_of(drafter, world)
    for row, slot in enumerate(world.slots):
        length = int(world.lens[slot])
        hidden = reference.hidden(world.taps[slot, : length - 1], int(world.tokens[slot, length - 1]))
        nodes = list(paths(tree, row))
        assert len(nodes) == drafter.speculation.num_nodes - 1
        likeliest = []
        for path, log_prob in nodes:
            expected = reference.next_logits(hidden, path[:-1]).log_softmax(-1)
            assert log_prob == pytest.approx(float(expected[path[-1]]), abs=tolerance), path
            likeliest.append(path[-1] == int(expected.argmax()))
        assert sum(likeliest) >= drafter.speculation.draft_steps if drafter.growth.top_k == 1 else likeliest[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_is_that_of_the_formula(tmp_path, family, num_layers):
    raw = raw_config(family, TAPS, num_layers, block_size=7)
    tensors = random_tensors(raw)
    reference = Reference(raw, tensors, family not in SHIFTED, [CAUSAL if family == "jetspec" else FULL] * num_layers)
    assert_as(reference, *fed(load(tmp_path, raw, tensors), CHAIN))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["dflash", "dspark-gated", "dspark-rnn", "dflash2"])
def test_every_node_of_a_tree_has_the_probability_of_its_path(tmp_path, family):
    raw = raw_config(family, TAPS, 2, block_size=7)
    tensors = random_tensors(raw)
    assert_as(Reference(raw, tensors, family not in SHIFTED, [FULL] * 2), *fed(load(tmp_path, raw, tensors), TREE))


@pytest.mark.parametrize("name", MASKS)
def test_slots_see_what_their_layer_lets_them(tmp_path, name):
    fields, masks = MASKS[name]
    raw = raw_config("dflash", TAPS, 2, **fields)
    tensors = random_tensors(raw)
    assert_as(Reference(raw, tensors, True, masks), *fed(load(tmp_path, raw, tensors), CHAIN))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["dflash", "dflash2", "p-eagle"])
@pytest.mark.parametrize(
    "fields",
    [{"partial_rotary_factor": 0.5}, {"is_neox_style": False}, {"partial_rotary_factor": 0.25, "is_neox_style": False}],
    ids=["a part", "neighbours", "a part, neighbours"],
)
def test_heads_turn_the_part_that_their_config_says(tmp_path, family, fields):
    if family == "p-eagle":
        assert_parallel_chain(tmp_path, parallel_config((0, 3, 6), 2, **fields), 3)
        return
    raw = raw_config(family, TAPS, 2, block_size=7, **fields)
    tensors = random_tensors(raw)
    assert_as(Reference(raw, tensors, True, [FULL] * 2), *fed(load(tmp_path, raw, tensors), CHAIN))


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_p_eagle_chain_is_that_of_the_formula(tmp_path, num_layers, steps):
    assert_parallel_chain(tmp_path, parallel_config((0, 3, 6), num_layers), steps)


def assert_parallel_chain(tmp_path, raw, steps):
    tensors = parallel_tensors(raw)
    checkpoint = read_one_pass_checkpoint(save_head(tmp_path, raw, tensors))
    head = load_parallel_head(checkpoint, TARGET, torch.float32, "cpu")
    drafter, world = fed(head, replace(CHAIN, draft_steps=steps, verify_tree_size=1 + steps), ParallelEagleDrafter)
    tree, reference = trees_of(drafter, world), ParallelReference(raw, tensors)
    for row, slot in enumerate(world.slots):
        pairs = int(world.lens[slot]) - 1
        expected = reference.logits(world.taps[slot, :pairs], world.tokens[slot, 1 : pairs + 1], steps).log_softmax(-1)
        for depth, (path, log_prob) in enumerate(paths(tree, row)):
            assert path[-1] == int(expected[depth].argmax())
            assert log_prob == pytest.approx(float(expected[depth].max()), abs=1e-5)


def test_a_heads_confidence_is_the_probability_of_its_best_tokens(tmp_path):
    raw = raw_config("dspark-gated", TAPS, 2, enable_confidence_head=True)
    tensors = random_tensors(raw)
    reference = Reference(raw, tensors, False, [FULL] * 2)
    drafter, world = fed(load(tmp_path, raw, tensors), CHAIN)
    tree = trees_of(drafter, world)
    for row, slot in enumerate(world.slots):
        length = int(world.lens[slot])
        hidden = reference.hidden(world.taps[slot, : length - 1], int(world.tokens[slot, length - 1]))
        for path, log_prob in paths(tree, row):
            assert path[-1] == int(reference.next_logits(hidden, path[:-1]).argmax())
            assert log_prob == pytest.approx(
                torch.tensor(reference.confidence(hidden, path[:-1])).log().item(), abs=1e-5
            )


def test_what_a_confident_head_leaves_to_others_is_no_more_than_is_left(tmp_path):
    raw = raw_config("dspark-gated", TAPS, 2, enable_confidence_head=True)
    drafter, world = fed(load(tmp_path, raw, random_tensors(raw)), SpeculationConfig(1, 4, 5))
    tree = trees_of(drafter, world)
    children = tree.scores[:, 1:].exp()
    assert bool((children.sum(dim=1) <= 1 + 1e-5).all())
    assert bool((children <= children[:, :1] + 1e-6).all())


@pytest.mark.parametrize("family", ["dflash", "dspark-rnn"])
def test_few_tokens_are_drafted_from_the_whole_block(tmp_path, family):
    """Fewer levels, by the trees' shape or by what a round asks for, are the first of the same tokens."""
    raw = raw_config(family, TAPS, 2, block_size=12)
    tensors = random_tensors(raw)
    drafter, world = fed(load(tmp_path, raw, tensors), CHAIN)
    whole = trees_of(drafter, world)
    with torch.inference_mode():
        asked = drafter.propose(world.batch(proposals=world.slots, max_levels=2))
    assert torch.equal(asked.token_ids, whole.token_ids)
    short, _ = fed(load(tmp_path, raw, tensors), SpeculationConfig(2, 1, 3))
    assert torch.equal(trees_of(short, world).token_ids, whole.token_ids[:, :3])
    reference = Reference(raw, tensors, family not in SHIFTED, [FULL] * 2)
    assert_as(reference, short, world)


def test_deeper_trees_than_the_block_are_refused(tmp_path):
    for family, drafted in (("dflash", 5), ("dspark-vanilla", 6)):
        raw = raw_config(family, TAPS, 1, block_size=6)
        head = load(tmp_path, raw, random_tensors(raw))
        with pytest.raises(ValueError, match=f"draft_steps=7: this head drafts {drafted} tokens at most"):
            OnePassDrafter(head, SpeculationConfig(7, 1, 8))


def test_wider_trees_than_the_candidates_are_refused(tmp_path):
    raw = raw_config("dflash2", TAPS, 1)
    with pytest.raises(ValueError, match="draft_top_k=9: this head has 6 candidates"):
        OnePassDrafter(load(tmp_path, raw, random_tensors(raw)), SpeculationConfig(3, 9, 16))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["dflash", "dspark-vanilla", "dflash2"])
def test_sampled_requests_are_drafted_by_the_targets_own_noise(tmp_path, family):
    """The first token is the best of logits over temperature and noise."""
    raw = raw_config(family, TAPS, 1)
    tensors = random_tensors(raw)
    drafter, world = fed(load(tmp_path, raw, tensors), CHAIN, temperatures=(0.9,) * NUM_SLOTS)
    tree, reference = trees_of(drafter, world), Reference(raw, tensors, family not in SHIFTED, [FULL])
    for row, slot in enumerate(world.slots):
        length = world.lens[slot]
        anchor = int(world.tokens[slot, length - 1])
        noise = gumbel_noise(world.seeds[slot : slot + 1], length[None], torch.arange(VOCAB))[0]
        hidden = reference.hidden(world.taps[slot, : length - 1], anchor)
        logits = reference.next_logits(hidden, [anchor], 0.9 * noise)
        assert int(tree.token_ids[row, 1]) == int((logits / 0.9 + noise).argmax())
