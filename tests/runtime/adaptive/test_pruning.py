"""Pruning on the device keeps the likeliest nodes, closed under parents, and tells the host what it needs to learn."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runtime.adaptive.reference_choice import drafted_trees
from tests.runtime.adaptive.test_adaptive import hostile, paths
from tests.runtime.models import CHAIN, TREE, Run, eagle_drafter, engine_config, greedy_params, reference
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.scripted import (
    ScriptedDrafter,
    malform,
    random_tree,
    right_tree,
    tree_tensors,
    well_formed,
    wrong_tree,
)
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.adaptive.acceptance import Acceptance, path_probabilities, unpack_evidence
from wingbeat.runtime.adaptive.pruning import DevicePruner, keep_nodes
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine

pytestmark = pytest.mark.few(2)

DEPTH = 15
SHAPES = {"chain": replace(CHAIN, adaptive=True), "tree": replace(TREE, adaptive=True)}


def some_trees(seed):
    chance = random.Random(seed)
    plans = [random_tree([5, 6, 7], 100, chance) for _ in range(6)]
    trees = tree_tensors([1, 2, 3, 4, 5, 6], plans, 16)
    steps = -torch.rand(trees.scores.shape, generator=torch.Generator().manual_seed(seed)) * 3
    for node in range(1, 16):
        trees.scores[:, node] = trees.scores.gather(1, trees.parents[:, node : node + 1])[:, 0] + steps[:, node]
    return trees


KINDS = np.array([0, 2, 3, 1, 0, 0, 0, 0, 0])
"""Row of the table by slot."""


def pruner_of(table):
    pruner = DevicePruner(len(KINDS), DEPTH, torch.device("cpu"))
    pruner.kinds[:] = torch.from_numpy(KINDS)
    pruner.upload(table)
    return pruner


def learned_table():
    """Acceptance that does not rise with confidence: any table will do."""
    return np.random.default_rng(0).uniform(0.05, 0.95, Acceptance().table.shape)


@pytest.mark.parametrize("num_nodes", [2, 5, 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest_nodes_stay_and_the_host_can_tell_which(seed, num_nodes):
    table, trees = learned_table(), some_trees(seed)
    slots = torch.tensor([4, 3, 0, 1, 2, 8])
    pruned, packed = pruner_of(table).prune(trees, slots, num_nodes)
    seen, kept = unpack_evidence(packed.numpy())
    assert pruned.token_ids.shape == (6, num_nodes)
    assert well_formed(pruned, 100)
    parts = (trees.parents, trees.depths, trees.scores, trees.num_valid)
    host = drafted_trees(*(part.numpy() for part in parts), DEPTH)
    for name in ("depths", "real"):
        assert (getattr(seen, name)[host.real] == getattr(host, name)[host.real]).all(), name
    path = np.where(host.real, path_probabilities(table[KINDS[slots.numpy()]], host), -1.0)
    for row in range(5):
        number = {0: ()}
        for node in np.flatnonzero(kept[row]):
            number[node] = (*number[int(trees.parents[row, node])], int(trees.token_ids[row, node]))
        assert paths(pruned, row) == sorted(number.values())
        count = int(trees.num_valid[row])
        assert seen.real[row].sum() == count - 1
        assert kept[row].sum() == min(count, num_nodes) - 1
        if 1 < num_nodes < count:
            worst_kept = path[row][kept[row]].min()
            assert worst_kept >= path[row][seen.real[row] & ~kept[row]].max() * (1 - 1e-5)
    given = trees.scores - trees.scores.gather(1, trees.parents.clamp_min(0))
    np.testing.assert_allclose(seen.log_probs[seen.real], given.numpy()[seen.real], rtol=1e-6)


def test_hostile_scores_and_depths_beyond_the_longest_path_prune_to_trees():
    trees = some_trees(1)
    chance = random.Random(2)
    hostile(trees, chance)
    trees = some_trees(1)._replace(scores=trees.scores)
    pruned, packed = DevicePruner(9, 3, torch.device("cpu")).prune(trees, torch.arange(6), 8)
    assert well_formed(pruned, 100)
    assert pruned.depths.max() <= 3
    assert np.isfinite(unpack_evidence(packed.numpy())[0].log_probs).all()


def test_the_host_keeps_the_nodes_that_the_device_keeps():
    """Both implementations rank alike: they keep equally many of the likeliest nodes of a tree."""
    table = learned_table()
    for seed in range(4):
        trees = some_trees(seed)
        pruned, packed = pruner_of(table).prune(trees, torch.arange(6), 6)
        parts = (trees.parents, trees.depths, trees.scores, trees.num_valid)
        host = drafted_trees(*(part.numpy() for part in parts), DEPTH)
        path = np.where(host.real, path_probabilities(table[KINDS[:6]], host), -1.0)
        best = np.argsort(-path, axis=1, kind="stable")[:, :5]
        kept = np.zeros(host.real.shape, bool)
        np.put_along_axis(kept, best, True, axis=1)
        kept &= host.real
        assert (unpack_evidence(packed.numpy())[1] == kept).all()
        for ours, theirs in zip(keep_nodes(trees, torch.from_numpy(kept), 6), pruned, strict=True):
            assert torch.equal(ours, theirs)


def drafter_of(kind, ref, shape):
    plans = {"right": right_tree, "wrong": wrong_tree, "malformed": random_tree}
    if kind in plans:
        return ScriptedDrafter(
            ref.sequences, plans[kind], ref.loaded.vocab_size, malform if kind == "malformed" else None
        )
    return eagle_drafter(ref.loaded, SHAPES[shape])


@pytest.mark.slow
@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize(
    ("shape", "kind", "overlap"), [("tree", "right", False), ("chain", "eagle", True), ("tree", "malformed", True)]
)
def test_text_stays_that_of_generate(shape, kind, overlap):
    ref = reference("llama")
    config = engine_config(SHAPES[shape], overlap=overlap)
    drafter = drafter_of(kind, ref, shape)
    engine = build_engine(ref.loaded, config, drafter, InProcessChannel, RecordingDevice())
    assert Run(engine, ref.prompts, greedy_params(64)).finish() == [tokens[:64] for tokens in ref.continuations]
    engine.model.remove_taps()
    stats = engine.stats()
    assert sum(stats.policy.decisions.values()) > 0
    assert stats.graphs.replays[Stage.BASE_VERIFICATION] > 0
    if kind == "right":
        assert stats.policy.num_accepted > 0
        assert stats.policy.expected_accepted == pytest.approx(stats.policy.num_accepted, rel=0.5)


@pytest.mark.slow
def test_hopeless_drafts_are_given_up_one_round_late():
    ref = reference("llama")
    engine = build_engine(
        ref.loaded, engine_config(SHAPES["tree"], overlap=True), drafter_of("wrong", ref, "tree"), InProcessChannel,
        RecordingDevice(),
    )  # fmt: skip
    assert Run(engine, ref.prompts, greedy_params()).finish() == ref.continuations
    engine.model.remove_taps()
    policy = engine.stats().policy
    assert policy.num_accepted == 0
    assert policy.decisions.get("plain", 0) > policy.decisions.get("speculate", 0)
