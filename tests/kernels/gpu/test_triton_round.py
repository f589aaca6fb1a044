"""Kernels of a round outside the forward pass agree with their references, also for padding and malformed trees."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gpu.test_triton_tree import random_tree
from wingbeat.kernels.gpu import kv as triton_kv
from wingbeat.kernels.gpu import round as triton_round
from wingbeat.kernels.gpu.sampling import launch
from wingbeat.kernels.gpu.sampling.scratch import SamplingWorkspace
from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.kernels.round import reference
from wingbeat.kernels.round.reference import DraftedFor, PathShape, SlotColumns, TreeRules, WalkedTrees
from wingbeat.kernels.tree.forced import Draws
from wingbeat.kernels.tree.results import GrownTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS, BLOCK_SIZE, NUM_BLOCKS = 6, 4, 9

pytestmark = [pytest.mark.few(4), pytest.mark.usefixtures("poisoned_memory")]


def on_device(value):
    """A copy there, of a tuple as well."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(DEVICE)
    return value if value is None else type(value)(*map(on_device, value))


def state_of() -> SlotColumns:
    """Sequences of 3 to 30 tokens; the last slot is spare."""
    draw = torch.Generator().manual_seed(0)
    lens = torch.randint(3, 30, (NUM_SLOTS,), generator=draw)
    lens[-1] = 1
    tables = torch.randint(1, 99, (NUM_SLOTS, NUM_BLOCKS), generator=draw)
    return SlotColumns(lens, torch.arange(NUM_SLOTS) % 2 + 1, torch.arange(NUM_SLOTS) + 7, tables)


def trees_of(num_rows: int, num_nodes: int, *, chains: bool = False) -> GrownTree:
    """Well-formed trees, or chains, of up to `num_nodes` nodes and one at least."""
    drawn = random_tree(num_rows, num_nodes, 2, num_nodes)
    parents = torch.arange(num_nodes).repeat(num_rows, 1) - 1 if chains else drawn["parents"].clamp_min(0)
    parents[:, 0] = -1
    depths = torch.zeros_like(parents)
    for node in range(1, num_nodes):
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    scores = torch.linspace(-3, 0, num_rows * num_nodes).view(num_rows, num_nodes)
    return GrownTree(drawn["token_ids"], parents, depths, scores, drawn["num_valid"].clamp_min(1))


def spoiled(trees: GrownTree) -> GrownTree:
    """Spoil each slot's tree in another way, except the last slot's, which is wrong only beyond its valid nodes."""
    _, num_nodes = trees.token_ids.shape
    trees.token_ids[:, 0] = state_of().last_token_ids
    trees.num_valid[:5] = num_nodes
    trees.parents[0, -1], trees.depths[1, -1], trees.token_ids[2, -1] = num_nodes, 0, 9
    trees.num_valid[3] = num_nodes + 1
    trees.token_ids[4, 0] += 1
    trees.num_valid[5] = num_nodes - 1
    trees.token_ids[5, -1], trees.parents[5, -1], trees.depths[5, -1] = 1 << 40, 99, -3
    return trees


def same(actual, expected) -> None:
    """Field by field."""
    for name, part in expected._asdict().items():
        assert torch.equal(getattr(actual, name).cpu(), part), name


@pytest.mark.parametrize("chains", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("wrong", [False, True], ids=["sound", "spoiled"])
def test_trees_are_believed_as_the_reference_believes_them(chains, wrong):
    state, trees, rules = state_of(), trees_of(NUM_SLOTS, 9, chains=chains), TreeRules(2, chains)
    trees.token_ids[:, 0] = state.last_token_ids
    trees = spoiled(trees) if wrong else trees
    grown = DraftedFor(state.epochs.clone(), state.committed_lens.clone())
    grown.epochs[1] += wrong
    slots = torch.tensor([5, 0, 2, 3, 1, 4])
    wanted = torch.tensor([True, True, True, not wrong, True, True])
    given = (trees, grown, slots, wanted, state)
    expected = reference.check_trees(*given, rules)
    if not wrong:
        assert torch.equal(expected.num_valid, trees.num_valid[slots])
    same(triton_round.check_trees(*map(on_device, given), rules), expected)


@pytest.mark.parametrize("num_nodes", [0, 1, 6, 33])
def test_nodes_lie_where_the_references_do(num_nodes):
    """Some of them past the last position, or past the blocks that the table has."""
    state, slots = state_of(), torch.tensor([0, 5, 3, 1, 5])
    tree = trees_of(len(slots), num_nodes) if num_nodes else None
    theirs = on_device(tree)
    expected = reference.place_nodes(slots, state, tree, 27, BLOCK_SIZE)._replace(tables=state.block_tables[slots])
    actual = triton_round.place_nodes(on_device(slots), on_device(state), theirs, 27, BLOCK_SIZE)
    same(actual, expected)
    if tree is not None:
        assert actual.token_ids is theirs.token_ids
        assert (expected.positions == 27).any() or num_nodes == 1


def drawn_limits(rate, max_path):
    """Limits of acceptance for paths shorter and longer than trees are deep."""
    return torch.tensor([round(rate * 2**23 / depth) for depth in range(1, max(max_path, 2))], dtype=torch.int32)


@pytest.mark.parametrize("rate", [None, 0.0, 0.7, 1.0])
@pytest.mark.parametrize("moves", [False, True], ids=["stay", "move"])
@pytest.mark.parametrize(("num_nodes", "max_path"), [(0, 4), (1, 3), (9, 4), (9, 12), (41, 6)])
def test_paths_are_settled_as_by_the_reference(num_nodes, max_path, moves, rate):
    """The spare slot, 5, pads two rows and stays unchanged."""
    state, slots = state_of(), torch.tensor([2, 5, 0, 3, 5, 1])
    tree = trees_of(len(slots), num_nodes) if num_nodes else None
    draw = torch.Generator().manual_seed(num_nodes)
    chosen = torch.randint(1, 3, (len(slots) * max(num_nodes, 1),), generator=draw)
    evidence = torch.randint(0, 99, (len(slots), 11), generator=draw) if moves else None
    roots = state.committed_lens[slots] - 1
    draws = None if rate is None else Draws(drawn_limits(rate, max_path), state.epochs, slots, roots)
    walked = WalkedTrees(slots, roots, tree, chosen, evidence, draws)
    shape, theirs = PathShape(max_path, 25, BLOCK_SIZE, moves), on_device(state)
    actual = triton_round.settle_paths(on_device(walked), theirs, shape)
    before = state.committed_lens.clone()
    expected = reference.settle_paths(walked, state, shape)
    if not moves:  # nobody reads them
        actual = actual._replace(sources=expected.sources, targets=expected.targets)
    same(actual, expected)
    for name, part in theirs._replace(last_token_ids=theirs.last_token_ids[:-1])._asdict().items():
        assert torch.equal(part.cpu(), getattr(state, name)[: len(part)]), name
    assert (state.committed_lens[-1], before[-1]) == (1, 1)
    assert (state.committed_lens - before)[slots[slots < 5]].equal(expected.num_tokens[slots < 5])


@pytest.mark.parametrize("width", [1, 5, 130])
def test_addresses_are_the_references(width):
    tables = torch.randint(1, 99, (3, 2 * NUM_BLOCKS))[:, ::2]
    positions = torch.arange(3 * width).view(3, width) * 3 - 4
    for counted in (None, positions % 2 == 0):
        expected = slot_mapping(tables, positions, BLOCK_SIZE, counted)
        found = triton_kv.slot_mapping(on_device(tables), on_device(positions), BLOCK_SIZE, on_device(counted))
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 5000), (3, 1024), (40, 2049)])
def test_best_tokens_are_the_first_of_the_likeliest(num_rows, vocab_size):
    """Equal results from a reused workspace, also with fewer rows than before; many tokens tie for the best."""
    draw = torch.Generator().manual_seed(num_rows)
    workspace = SamplingWorkspace(num_rows + 1, vocab_size, DEVICE, scaled=False)
    for count in (num_rows, max(num_rows - 1, 1), num_rows):
        logits = torch.randint(0, 40, (count, vocab_size), generator=draw).to(torch.bfloat16)
        logits[0] = float("-inf")
        found = launch.best_tokens(logits.to(DEVICE), workspace)
        assert torch.equal(found.cpu(), logits.float().argmax(dim=-1))
    assert not workspace.num_done.any()
