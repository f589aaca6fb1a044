"""The draft engine grows the trees that its head means, of every kind of EAGLE head, chains and trees."""

from dataclasses import replace

import pytest
import torch

from tests.runtime.draft_world import BLOCK_SIZE, BLOCKS_PER_SEQ, MAX_LEN, NUM_SLOTS, World, channel_spec
from tests.runtime.tensorrt.draft_parity import GRIDS, HEADS, draft_differences, head_of, run_densely
from tests.runtime.tensorrt.engine_world import draft_config, draft_session
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.growth import Growth
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter

SHAPES = {
    "tree": SpeculationConfig(draft_steps=4, draft_top_k=3, verify_tree_size=12),
    "chain": SpeculationConfig(draft_steps=5, draft_top_k=1, verify_tree_size=6),
}
LENS = (17, 3, 29, 8, 2)


class DenseTrees:
    """Trees of a head without any KV: every node's whole path is run from the start of its sequence."""

    def __init__(self, head, world: World, speculation: SpeculationConfig) -> None:
        self.head, self.world = head, world
        self.growth = Growth(speculation, head.draft_token_ids)

    def grow(self, max_levels: int | None):
        """Grow a tree per sequence of the world."""
        world = self.world
        batch = world.batch(proposals=world.slots, max_levels=max_levels)
        roots = self.growth.roots(batch, torch.tensor(world.slots))
        self.level_before = [[([], self.hidden(slot, []))] for slot in world.slots]
        logits = torch.stack([self.head.logits(nodes[0][1])[None] for nodes in self.level_before])
        return self.growth.grow(roots, logits, self.expand)

    def expand(self, level):
        """Logits of what follows each node of a level."""
        now = []
        for row, slot in enumerate(self.world.slots):
            nodes = []
            for token, parent in zip(level.token_ids[row], level.parents[row].tolist(), strict=True):
                path, hidden = self.level_before[row][parent]
                longer = [*path, (token, self.head.feedback(hidden))]
                nodes.append((longer, self.hidden(slot, longer)))
            now.append(nodes)
        self.level_before = now
        return torch.stack([torch.stack([self.head.logits(hidden) for _, hidden in nodes]) for nodes in now])

    def hidden(self, slot: int, path) -> torch.Tensor:
        """The head's output at the end of a path behind a sequence's known pairs."""
        world, head = self.world, self.head
        known = int(world.lens[slot]) - 1
        ids = torch.cat([world.tokens[slot, 1 : known + 1], *(token[None] for token, _ in path)])
        features = torch.cat([head.fuse(world.taps[slot, :known]), *(feature[None] for _, feature in path)])
        return run_densely(head, ids[None], features[None])


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", HEADS)
def test_every_step_gives_what_the_head_gives_over_whole_paths(kind, batch):
    head = head_of(kind, std=0.1)
    config = draft_config(head)
    differences = draft_differences(draft_session(head, config), config, head, batch)
    assert max(differences.values()) <= 2e-5, differences


@pytest.mark.parametrize("kind", ["grids", "latent-grids", "eagle3", "deep", "eagle1"])
def test_every_step_behind_images_gives_what_the_head_gives_over_whole_paths(kind):
    head = head_of(kind, std=0.1)
    config = draft_config(head, GRIDS)
    assert config.media == (3 if "grids" in kind else 0, 32)
    differences = draft_differences(draft_session(head, config), config, head, 4)
    assert max(differences.values()) <= 2e-5, differences


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.few(2)
@torch.inference_mode()
def test_trees_are_those_of_whole_paths(kind, shape, temperature):
    speculation, head = SHAPES[shape], head_of(kind)
    config = draft_config(head)
    session = draft_session(head, config)
    engine = EngineDrafter(session, config, head.draft_token_ids, speculation)
    spec = channel_spec(speculation, head.taps_size)
    engine.resize(spec, NUM_SLOTS, spec.num_blocks)
    world = World(speculation, head.taps_size, LENS, (temperature,) * NUM_SLOTS)
    world.feed(engine)
    dense = DenseTrees(head, world, speculation)
    for levels in (None, 2):
        found, expected = engine.draft(world.batch(proposals=world.slots, max_levels=levels)), dense.grow(levels)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.parents, expected.parents)
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-4)
    assert {"prefill", "accept", "proposal"} == {str(stage) for stage in session.ran}


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_the_torch_drafters_trees_are_those_of_whole_paths_too(kind, shape):
    speculation, head = SHAPES[shape], head_of(kind)
    drafter = EagleDrafter(head_of(kind), speculation)
    spec = channel_spec(speculation, head.taps_size)
    drafter.resize(spec, NUM_SLOTS, spec.num_blocks)
    world = World(speculation, head.taps_size, LENS)
    world.feed(drafter)
    found = drafter.draft(world.batch(proposals=world.slots))
    expected = DenseTrees(head, world, speculation).grow(None)
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=1e-4)


def test_longer_sequences_than_the_engine_has_rows_for_are_refused():
    speculation, head = SHAPES["tree"], head_of("eagle3")
    config = draft_config(head)
    engine = EngineDrafter(draft_session(head, config), config, head.draft_token_ids, speculation)
    spec = channel_spec(speculation, head.taps_size)
    longer = replace(spec, max_model_len=MAX_LEN * 100)
    with pytest.raises(ValueError, match="max_model_len is 6400: the engine has max_kv_cache_capacity 256"):
        engine.resize(longer, NUM_SLOTS, 10)


@torch.inference_mode()
def test_a_sequence_that_begins_with_others_blocks_has_their_pairs():
    speculation, head = SHAPES["tree"], head_of("deep")
    config = draft_config(head)
    engine = EngineDrafter(draft_session(head, config), config, head.draft_token_ids, speculation)
    spec = channel_spec(speculation, head.taps_size)
    engine.resize(spec, NUM_SLOTS, spec.num_blocks)
    world = World(speculation, head.taps_size, LENS)
    world.feed(engine)
    longest = max(world.slots, key=lambda slot: int(world.lens[slot]))
    other = next(slot for slot in range(NUM_SLOTS) if slot not in world.slots)
    shared, known = 5 * BLOCK_SIZE, int(world.lens[longest]) - 1
    world.tables[other, :5] = world.tables[longest, :5]
    for part in (world.tokens, world.taps, world.lens):
        part[other] = part[longest]
    engine.commit(world.batch(chunks=[(other, shared, known - shared)]))
    found = engine.propose(world.batch(proposals=[longest, other]))
    assert torch.equal(*found.token_ids)
    torch.testing.assert_close(*found.scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_blocks", [NUM_SLOTS * BLOCKS_PER_SEQ + 1, None], ids=["pages", "one block a sequence"])
def test_more_rows_keep_what_is_committed(num_blocks):
    speculation, head = SHAPES["tree"], head_of("eagle3")
    config = draft_config(head)
    engine = EngineDrafter(draft_session(head, config), config, head.draft_token_ids, speculation)
    spec, world = channel_spec(speculation, head.taps_size), World(speculation, head.taps_size, LENS)
    if num_blocks is None:
        spec, world.tables = replace(spec, max_blocks_per_seq=1), torch.arange(1, NUM_SLOTS + 1)[:, None]
    engine.resize(spec, NUM_SLOTS, num_blocks or NUM_SLOTS + 1)
    world.feed(engine)
    assert bool(engine.runner.kv.pages) == (num_blocks is not None)
    before = engine.propose(world.batch(proposals=world.slots))
    engine.resize(spec, 2 * NUM_SLOTS, 2 * (num_blocks or NUM_SLOTS + 1))
    assert torch.equal(engine.propose(world.batch(proposals=world.slots)).token_ids, before.token_ids)
