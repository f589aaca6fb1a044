"""C++ intake of drafted trees: validity, chosen nodes and memory layout are those of the Python references."""

import random

import pytest
import torch

from tests.kernels.slow_trees import random_parents
from wingbeat.kernels.cpu.drafted import Shape, SlotTensors
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.round.reference import DraftedFor, TreeRules, believed
from wingbeat.kernels.tree.reference import ancestor_words
from wingbeat.kernels.tree.results import GrownTree
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.cpu.round.host_trees import HostInbox, HostTrees
from wingbeat.runtime.cpu.round.packed_rows import PackedDecodes
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.slots import DecodeRows, SlotState

pytestmark = [pytest.mark.few(4), pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")]
NUM_SLOTS, NUM_NODES, VOCAB = 9, 8, 50


def depths_of(parents):
    depths = torch.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    return depths


def drafted(rng, count, shape="random"):
    parents = random_parents(rng, count, NUM_NODES, shape)
    parents[:, 0] = 0
    depths = depths_of(parents)
    parents[:, 0] = -1
    tokens = torch.tensor([[rng.randrange(VOCAB) for _ in range(NUM_NODES)] for _ in range(count)])
    given = torch.tensor([[0.0] + [-rng.expovariate(1.0) for _ in range(NUM_NODES - 1)] for _ in range(count)])
    scores = given.clone()
    for node in range(1, NUM_NODES):
        scores[:, node] = given[:, node] + scores.gather(1, parents[:, node : node + 1])[:, 0]
    num_valid = torch.tensor([rng.randrange(1, NUM_NODES + 1) for _ in range(count)])
    return TokenTree(tokens, parents, depths, scores, num_valid)


class Reply:
    """Reply of a drafter."""

    def __init__(self, trees, epochs, committed_lens):
        self.epochs, self.committed_lens = epochs, committed_lens
        for name, field in trees._asdict().items():
            setattr(self, name, field)


def spoilt(rng, trees):
    """Change a random field of a random tree."""
    row, node = rng.randrange(NUM_SLOTS), rng.randrange(NUM_NODES)
    field = rng.choice(["token_ids", "parents", "depths", "num_valid"])
    wrong = rng.choice([-7, -1, 0, 1, NUM_NODES, NUM_NODES + 1, VOCAB, 1 << 40])
    if field == "num_valid":
        trees.num_valid[row] = wrong
    else:
        getattr(trees, field)[row, node] = wrong


def engine_state(rng, *, chains=False):
    config = EngineConfig(max_num_seqs=NUM_SLOTS, speculation=SpeculationConfig(5, 1 if chains else 2, NUM_NODES))
    state = SlotState(config, VOCAB, torch.device("cpu"))
    state.epochs[:] = torch.arange(len(state.epochs)) + 3
    state.committed_lens[:] = torch.tensor([rng.randrange(1, 120) for _ in range(len(state.committed_lens))])
    state.temperatures[:] = torch.tensor([rng.randrange(2) * 0.7 for _ in range(len(state.temperatures))])
    state.block_tables[:] = torch.randperm(state.block_tables.numel()).view(state.block_tables.shape)
    return config, state


def intake_of(config, state, last_position=100):
    present = SlotTensors(*(getattr(state, name) for name in SlotTensors._fields))
    shape = Shape(VOCAB, config.speculation.draft_top_k == 1, config.block_size, last_position)
    return cpu_kernels().draft_intake(present, shape)


def by_torch(config, state, last_position=100):
    return BatchBuilder(None, state, config, last_position)


def believed_by_torch(reply, rows, state, chains):
    """By the reference: one tree per decode, padded to the largest; None where no tree is usable."""
    trees = GrownTree(*(getattr(reply, name)[rows.slots] for name in TokenTree._fields))
    grown = DraftedFor(reply.epochs[rows.slots], reply.committed_lens[rows.slots])
    trees, usable = believed(trees, grown, rows.slots, rows.wanted, state.columns, TreeRules(VOCAB - 1, chains))
    return _narrowed(TokenTree(*trees)) if usable.any() else None


def _narrowed(trees):
    width = int(trees.num_valid.max())
    return TokenTree(*(field[:, :width] if field.dim() == 2 else field for field in trees))


def sent(rng, state, *, chains=False):
    """A random reply, partly malformed or stale, and the decodes that wait for it."""
    trees = drafted(rng, NUM_SLOTS, "chain" if chains and rng.random() < 0.7 else "random")
    trees.scores[:] = torch.round(trees.scores * 2) / 2  # so that some scores are equal
    state.last_token_ids[:-1] = trees.token_ids[:, 0]
    reply = Reply(trees, state.epochs[:-1].clone(), state.committed_lens[:-1].clone())
    for column in (reply.epochs, reply.committed_lens, state.last_token_ids):
        if rng.random() < 0.5:
            column[rng.randrange(NUM_SLOTS)] += 1
    for _ in range(rng.randrange(4)):
        spoilt(rng, trees)
    slots = torch.tensor(rng.sample(range(NUM_SLOTS), rng.randrange(1, NUM_SLOTS + 1)))
    return reply, DecodeRows(slots, torch.tensor([rng.random() < 0.8 for _ in slots]))


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_believed_is_what_the_reference_believes(seed, chains):
    rng = random.Random(seed)
    config, state = engine_state(rng, chains=chains)
    reply, rows = sent(rng, state, chains=chains)

    found = HostInbox(intake_of(config, state)).collect(reply, rows).checked()

    expected = believed_by_torch(reply, rows, state, chains)
    assert (found is None) == (expected is None)
    if found is not None:
        for name, field in expected._asdict().items():
            if name != "scores":
                assert torch.equal(getattr(found, name), field), name
        counted = torch.arange(found.scores.shape[1]) < expected.num_valid[:, None]
        assert torch.equal(found.scores[counted], expected.scores[counted])


def assert_alike(found, expected):
    """Both hold the same nodes, without regard to the padding of rows."""
    real = torch.arange(expected.token_ids.shape[1]) < expected.tree.num_valid[:, None]
    for name in ("token_ids", "parents", "depths", "scores"):
        one, other = (getattr(decodes.tree, name)[real].nan_to_num() for decodes in (found, expected))
        assert torch.equal(one, other), name
    assert torch.equal(found.tree.num_valid, expected.tree.num_valid)
    assert torch.equal(found.roots, expected.roots)
    assert torch.equal(found.token_ids[real], expected.token_ids[real])
    assert torch.equal(found.positions[real], expected.positions[real])
    assert torch.equal(found.slot_mapping, expected.slot_mapping)
    assert (found.packing is None) == bool(real.all())
    assert found.num_rows == real.sum()
    for own, padded in zip(found.flat, (expected.token_ids, expected.positions, expected.slot_mapping), strict=True):
        assert torch.equal(own, padded[real])
        assert torch.equal(found.packed(padded), padded[real])
        assert torch.equal(found.padded(own)[real], padded[real])
    nodes = torch.stack([torch.zeros_like(found.tree.num_valid), found.tree.num_valid - 1], dim=1)
    assert torch.equal(found.flat[0][found.rows_of(nodes)], found.token_ids.gather(1, nodes))
    starts = found.segment.row_starts
    assert (starts is None) == bool(real.all())
    if starts is not None:
        assert torch.equal(starts.diff(), found.tree.num_valid)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_checked_trees_lie_where_the_reference_puts_them(seed):
    """All nodes are verified, as happens without a policy or after a grammar has added nodes."""
    rng = random.Random(seed)
    config, state = engine_state(rng)
    state.last_token_ids[:] = torch.arange(len(state.last_token_ids)) + 1
    count = rng.randrange(1, NUM_SLOTS + 1)
    slots, trees = torch.tensor(rng.sample(range(NUM_SLOTS), count)), drafted(rng, count)
    if seed % 3 == 0:
        trees.num_valid[:] = NUM_NODES
    trees = _narrowed(trees)
    found = HostTrees.of_checked(intake_of(config, state), slots, trees).verified()
    expected = by_torch(config, state).decodes(slots, trees._replace(token_ids=trees.token_ids.clone()))
    if found is None:
        assert not (trees.num_valid > 1).any()
        return
    assert_alike(found.decodes, expected)


@pytest.mark.parametrize("seed", range(3))
def test_bare_roots_lie_where_the_reference_puts_them(seed):
    rng = random.Random(seed)
    config, state = engine_state(rng)
    slots = torch.tensor(rng.sample(range(NUM_SLOTS), NUM_SLOTS - seed))
    found = PackedDecodes.of(slots, intake_of(config, state, 200).roots(slots), bare=True)
    expected = by_torch(config, state).decodes(slots, None)
    for name in ("slots", "roots", "token_ids", "positions", "slot_mapping"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.tree is None
    assert found.segment.mask_words is None


@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize("num_nodes", [2, 63, 64, 65, 130])
def test_nodes_see_what_the_reference_says(num_nodes, shape):
    config, state = engine_state(random.Random(0))
    parents = random_parents(random.Random(num_nodes), 3, num_nodes, shape)
    ids = torch.ones_like(parents)
    trees = TokenTree(ids, parents, depths_of(parents.clamp_min(0)), ids.float(), ids[:, 0] * num_nodes)
    taken = HostTrees.of_checked(intake_of(config, state), torch.arange(3), trees).choose_nodes()
    assert torch.equal(taken.ancestors, ancestor_words(parents))
