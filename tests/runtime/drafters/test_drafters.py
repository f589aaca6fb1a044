"""The EAGLE drafter against the head run densely with EAGLE-2 growth in plain Python; prompt lookup by example."""

import pytest
import torch

from tests.runtime.draft_world import NUM_SLOTS, World, channel_spec
from tests.runtime.models import CHAIN, TREE, random_head, reference
from tests.runtime.slow_growth import assert_tree
from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter


def causal(query, key, value):
    """Dense attention [T, heads, D] of each pair over itself and all before it, in double."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, dim=1).double() for part in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query.double(), key) * query.shape[-1] ** -0.5
    logits += torch.full(logits.shape[1:], float("-inf"), dtype=torch.float64).triu(1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), value).to(query.dtype)


def slow_tree(head, world, slot, speculation):
    """EAGLE-2: (token, parent, depth, score) by node. Every node's hidden state comes from its whole path, densely."""
    length = int(world.lens[slot])
    temperature = float(world.temperatures[slot])

    def hidden_of(path, path_hidden):
        tokens = torch.cat([world.tokens[slot, 1:length], torch.tensor(path, dtype=torch.int64)])
        features = head.fuse(world.taps[slot, : length - 1])
        if path:
            features = torch.cat([features, head.feedback(torch.stack(path_hidden))])
        return head(tokens, features, head.rotary(torch.arange(len(tokens))), causal)[-1]

    def children(hidden, level):
        logits = head.logits(hidden).double()
        if temperature > 0:
            noise = gumbel_noise(world.seeds[slot : slot + 1], torch.tensor([length + level]), head.draft_token_ids)
            logits = logits / temperature + noise[0].double()
        best = logits.log_softmax(-1).topk(speculation.draft_top_k)
        return list(zip(head.draft_token_ids[best.indices].tolist(), best.values.tolist(), strict=True))

    # An entry is (token, parent entry, depth, score, path, hidden states the path was fed with).
    table = [(int(world.tokens[slot, length - 1]), -1, 0, 0.0, [], [])]
    frontier = [0]
    for level in range(speculation.max_path - 1):
        added = []
        for entry in frontier:
            _, _, depth, score, path, fed = table[entry]
            hidden = hidden_of(path, fed)
            for token, log_prob in children(hidden, level):
                added.append(len(table))
                table.append((token, entry, depth + 1, score + log_prob, [*path, token], [*fed, hidden]))
        frontier = sorted(added, key=lambda entry: (-table[entry][3], entry))[: speculation.draft_top_k]
    best = sorted(range(1, len(table)), key=lambda entry: (-table[entry][3], entry))
    kept = [0, *sorted(best[: speculation.num_nodes - 1])]
    number = {entry: index for index, entry in enumerate(kept)}
    return [(table[entry][0], number.get(table[entry][1], -1), *table[entry][2:4]) for entry in kept]


@pytest.mark.few(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft_vocab_size", [None, 48])
@pytest.mark.parametrize(
    "speculation",
    [CHAIN, TREE, SpeculationConfig(3, 3, 30), SpeculationConfig(1, 3, 3)],
    ids=["chain", "tree", "whole", "one"],
)
@torch.inference_mode()
def test_trees_equal_the_slow_ones(speculation, draft_vocab_size, temperature):
    head = random_head(reference("llama").loaded, draft_vocab_size=draft_vocab_size)
    taps_size = head.fc.weight.shape[1]
    world = World(speculation, taps_size, (2, 9, 17, 40), (0.0, *(temperature,) * (NUM_SLOTS - 1)))
    drafter = EagleDrafter(head, speculation)
    spec = channel_spec(speculation, taps_size)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    world.feed(drafter)
    chosen = world.slots[1:] + world.slots[:1]
    tree = drafter.propose(world.batch(proposals=chosen))
    for row, slot in enumerate(chosen):
        assert_tree(tree, row, slow_tree(head, world, slot, speculation))
    assert tree.num_valid.tolist() == [speculation.num_nodes] * len(chosen)


@torch.inference_mode()
def test_proposing_leaves_no_trace():
    """`propose` never commits draft KV, so a repeated call returns the same trees."""
    head = random_head(reference("llama").loaded)
    world = World(TREE, head.fc.weight.shape[1], (9, 17))
    drafter = EagleDrafter(head, TREE)
    spec = channel_spec(TREE, world.taps_size)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    world.feed(drafter)
    before = drafter.propose(world.batch(proposals=world.slots))
    after = drafter.propose(world.batch(proposals=world.slots))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_eagle_drafter_refuses_channels_of_another_shape():
    head = random_head(reference("llama").loaded)
    taps_size = head.fc.weight.shape[1]
    drafter = EagleDrafter(head, TREE)
    for spec, message in ((channel_spec(TREE, 64), "size 64"), (channel_spec(CHAIN, taps_size), "6 nodes")):
        with pytest.raises(ValueError, match=message):
            drafter.resize(spec, 1, 1)
