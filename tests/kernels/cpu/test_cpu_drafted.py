"""Drafted trees on the host by the CPU's kernels: what is believed, and what is verified, as the references say."""

import random

import numpy as np
import pytest
import torch

from tests.kernels.slow_trees import random_parents
from wingbeat.kernels.cpu.drafted import Prices
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.pruning import keep_nodes
from wingbeat.runtime.round.slots import DecodeRows, SlotState
from wingbeat.runtime.round.tree_check import HostTrees, TreeCheck
from wingbeat.runtime.speculation.acceptance import EDGES, Acceptance, DraftedTrees, path_probabilities

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
    """What a drafter sent."""

    def __init__(self, trees, epochs, committed_lens):
        self.epochs, self.committed_lens = epochs, committed_lens
        for name, field in trees._asdict().items():
            setattr(self, name, field)


def spoilt(rng, trees):
    """One field of one tree is no longer what it was."""
    row, node = rng.randrange(NUM_SLOTS), rng.randrange(NUM_NODES)
    field = rng.choice(["token_ids", "parents", "depths", "num_valid"])
    wrong = rng.choice([-7, -1, 0, 1, NUM_NODES, NUM_NODES + 1, VOCAB, 1 << 40])
    if field == "num_valid":
        trees.num_valid[row] = wrong
    else:
        getattr(trees, field)[row, node] = wrong


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_believed_is_what_the_reference_believes(seed, chains):
    rng = random.Random(seed)
    config = EngineConfig(max_num_seqs=NUM_SLOTS, speculation=SpeculationConfig(5, 2, NUM_NODES))
    state = SlotState(config, VOCAB, torch.device("cpu"))
    state.epochs[:] = torch.arange(len(state.epochs)) + 3
    state.committed_lens[:] = torch.arange(len(state.epochs)) * 2 + 5
    trees = drafted(rng, NUM_SLOTS, "chain" if chains and rng.random() < 0.7 else "random")
    state.last_token_ids[:-1] = trees.token_ids[:, 0]
    reply = Reply(trees, state.epochs[:-1].clone(), state.committed_lens[:-1].clone())
    for column in (reply.epochs, reply.committed_lens, state.last_token_ids):
        if rng.random() < 0.5:
            column[rng.randrange(NUM_SLOTS)] += 1
    for _ in range(rng.randrange(4)):
        spoilt(rng, trees)
    slots = torch.tensor(rng.sample(range(NUM_SLOTS), rng.randrange(1, NUM_SLOTS + 1)))
    rows = DecodeRows(slots, torch.tensor([rng.random() < 0.8 for _ in slots]))
    check = TreeCheck(NUM_NODES, VOCAB, torch.device("cpu"), chains=chains)

    found = HostTrees(check, cpu_kernels().draft_intake()).believed(reply, rows, state)

    expected = HostTrees(check, None).believed(reply, rows, state)
    assert (found is None) == (expected is None)
    if found is not None:
        for name, field in expected._asdict().items():
            if name != "scores":
                assert torch.equal(getattr(found, name), field), name
        counted = torch.arange(found.scores.shape[1]) < expected.num_valid[:, None]
        assert torch.equal(found.scores[counted], expected.scores[counted])


@pytest.mark.parametrize("shape", ["random", "chain", "star"])
@pytest.mark.parametrize("price", [None, 0.0, 0.02, 0.2, 3.0])
@pytest.mark.parametrize("num_reqs", [1, 5])
def test_the_nodes_that_stay_are_the_references(num_reqs, price, shape):
    """Ties included: of equally likely nodes the earlier ones stay."""
    for seed in range(20):
        rng = random.Random(seed)
        trees = drafted(rng, num_reqs, shape)
        trees.scores[:] = torch.round(trees.scores * 2) / 2
        if seed % 4 == 0:
            trees.scores[0, -1] = float("nan")
        acceptance, max_depth = Acceptance(), 4
        kinds = np.array([rng.randrange(2) for _ in range(num_reqs)])
        useful = np.array([rng.randrange(6) for _ in range(num_reqs)])
        forced = np.array([rng.random() < 0.2 for _ in range(num_reqs)])
        prices = None if price is None else price * np.arange(num_reqs * NUM_NODES + 1.0)

        known = (kinds, useful, forced, acceptance.table, EDGES, prices)
        own, levels, also, *by = (None if part is None else torch.from_numpy(part) for part in known)
        found = cpu_kernels().draft_intake().choose(tuple(trees), own, levels, also, Prices(*by), max_depth)

        parts = (trees.parents, trees.depths, trees.scores, trees.num_valid)
        reference = DraftedTrees.of_scores(*(part.numpy() for part in parts), max_depth)
        path = np.stack(
            [
                path_probabilities(acceptance.table[kinds[row : row + 1]], reference.rows(slice(row, row + 1)))[0]
                for row in range(num_reqs)
            ]
        )
        within = reference.real & (reference.depths <= useful[:, None])
        kept = within
        if prices is not None:
            values = np.where(within, path, -1.0).ravel()
            order = (-values).argsort(kind="stable")[: int(within.sum())]
            best = int((np.append(0.0, values[order].cumsum()) - prices[: len(order) + 1]).argmax())
            kept = np.zeros(values.shape, dtype=bool)
            kept[order[:best]] = True
            kept = kept.reshape(path.shape) | (within & forced[:, None])
        assert np.array_equal(found.kept.numpy(), kept)
        assert np.array_equal(found.real.numpy(), reference.real)
        assert np.array_equal(found.log_probs.numpy(), reference.log_probs)
        width = int(1 + kept.sum(axis=1).max())
        expected = keep_nodes(trees, torch.from_numpy(kept), width)
        shown = torch.arange(width) < expected.num_valid[:, None]
        for one, other in zip(found.trees[:4], expected[:4], strict=True):
            assert torch.equal(one[shown].nan_to_num(), other[shown].nan_to_num())
        assert torch.equal(found.trees[4], expected.num_valid)


@pytest.mark.parametrize("seed", range(20))
def test_rows_lie_where_the_reference_puts_them(seed):
    rng = random.Random(seed)
    config = EngineConfig(max_num_seqs=NUM_SLOTS, speculation=SpeculationConfig(5, 2, NUM_NODES))
    state = SlotState(config, VOCAB, torch.device("cpu"))
    state.committed_lens[:] = torch.tensor([rng.randrange(1, 120) for _ in range(len(state.committed_lens))])
    state.last_token_ids[:] = torch.arange(len(state.last_token_ids)) + 1
    state.block_tables[:] = torch.randperm(state.block_tables.numel()).view(state.block_tables.shape)
    count = rng.randrange(1, NUM_SLOTS + 1)
    slots, trees = torch.tensor(rng.sample(range(NUM_SLOTS), count)), drafted(rng, count)
    if seed % 3 == 0:
        trees.num_valid[:] = NUM_NODES
    by_torch = BatchBuilder(None, state, config, 100, on_host=True)
    by_kernel = BatchBuilder(None, state, config, 100, on_host=True, kernels=cpu_kernels())

    found, expected = (
        builder.decodes(slots, trees._replace(token_ids=trees.token_ids.clone())) for builder in (by_kernel, by_torch)
    )

    real = torch.arange(NUM_NODES) < trees.num_valid[:, None]
    assert torch.equal(found.roots, expected.roots)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.positions[real], expected.positions[real])
    assert torch.equal(found.slot_mapping, expected.slot_mapping)
    assert (found.packing is None) == (expected.packing is None)
    if expected.packing is not None:
        assert torch.equal(found.packing.rows[real], expected.packing.rows[real])
        assert torch.equal(found.packing.nodes, expected.packing.nodes)
        assert torch.equal(found.packing.starts, expected.packing.starts)
        for own, padded in zip(
            found.flat, (expected.token_ids, expected.positions, expected.slot_mapping), strict=True
        ):
            assert torch.equal(own, expected.packed(padded))
