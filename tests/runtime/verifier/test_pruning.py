"""Pruning on the device keeps the likeliest nodes, closed under parents, and tells the host what it needs to learn."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runtime.engine.test_adaptive import hostile, paths
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
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.speculation.acceptance import AcceptanceTracker, path_probabilities
from wingbeat.runtime.speculation.costs import CostTables, RoundCosts
from wingbeat.runtime.speculation.policy import SpeculationPolicy
from wingbeat.runtime.verifier.pruning import DevicePruner, unpack_evidence
from wingbeat.runtime.verifier.slots import SlotState

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


def pruner_of(tracker=None):
    slots = SlotState(engine_config(max_num_seqs=8), 100, torch.device("cpu"))
    slots.temperatures[3] = 0.7
    pruner = DevicePruner(slots, DEPTH)
    if tracker is not None:
        pruner.upload(tracker)
    return pruner


def learned_tracker():
    tracker = AcceptanceTracker(8, DEPTH)
    numbers = np.random.default_rng(0)
    for _ in range(40):
        tried = numbers.random((8, 6)) < 0.8
        accepted = tried & (numbers.random((8, 6)) < 0.4)
        depths = np.tile(np.arange(1, 7), (8, 1))
        tracker.record(-numbers.random((8, 6)) * 4, depths, numbers.random(8) < 0.5, np.arange(8), tried, accepted)
    return tracker


@pytest.mark.parametrize("num_nodes", [2, 5, 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest_nodes_stay_and_the_host_can_tell_which(seed, num_nodes):
    tracker, trees = learned_tracker(), some_trees(seed)
    slots = torch.tensor([4, 3, 0, 1, 2, 8])
    pruned, packed = pruner_of(tracker).prune(trees, slots, num_nodes)
    seen = unpack_evidence(packed.numpy())
    assert pruned.token_ids.shape == (6, num_nodes)
    assert well_formed(pruned, 100)
    sampled = (slots == 3).numpy()
    host = tracker.conditional(seen.log_probs[:5], seen.depths[:5], sampled[:5], slots[:5].numpy())
    path = np.where(seen.real[:5], path_probabilities(host, seen.parents[:5], DEPTH - 1), -1.0)
    for row in range(5):
        number = {0: ()}
        for node in np.flatnonzero(seen.kept[row]):
            number[node] = (*number[int(trees.parents[row, node])], int(trees.token_ids[row, node]))
        assert paths(pruned, row) == sorted(number.values())
        count = int(trees.num_valid[row])
        assert seen.real[row].sum() == count - 1
        assert seen.kept[row].sum() == min(count, num_nodes) - 1
        if 1 < num_nodes < count:
            worst_kept = path[row][seen.kept[row]].min()
            assert worst_kept >= path[row][seen.real[row] & ~seen.kept[row]].max() * (1 - 1e-5)
    given = trees.scores - trees.scores.gather(1, trees.parents.clamp_min(0))
    np.testing.assert_allclose(seen.log_probs[seen.real], given.numpy()[seen.real], rtol=1e-6)


def test_hostile_scores_and_depths_beyond_the_longest_path_prune_to_trees():
    trees = some_trees(1)
    chance = random.Random(2)
    hostile(trees, chance)
    trees = some_trees(1)._replace(scores=trees.scores)
    slots = SlotState(engine_config(max_num_seqs=8), 100, torch.device("cpu"))
    pruned, packed = DevicePruner(slots, 3).prune(trees, torch.arange(6), 8)
    assert well_formed(pruned, 100)
    assert pruned.depths.max() <= 3
    assert np.isfinite(unpack_evidence(packed.numpy()).log_probs).all()


def policy_of(verify_s):
    tables = CostTables((1, 8), (0, 3, 7, 15), (verify_s, verify_s), (0.0, 0.0), (1e-4, 1e-4), (1e-4, 1e-4))
    return SpeculationPolicy(RoundCosts(tables), AcceptanceTracker(8, 5), 5, 16)


def test_the_width_follows_what_nodes_cost_and_bring():
    flat, steep = policy_of((1e-2, 1e-2, 1e-2, 1e-2)), policy_of((1e-2, 1.2e-2, 3e-2, 9e-2))
    for policy in (flat, steep):
        policy.plan(4, 4, 100.0)
    assert flat.choose_width(4, 4, 100.0, (4, 8, 16)) == 16
    assert steep.choose_width(4, 4, 100.0, (4, 8, 16)) == 4
    # Trees whose mass lies in their three best nodes.
    path = np.full((4, 16), 1e-3)
    path[:, 1:4] = 0.9
    real = np.ones((4, 16), bool)
    real[:, 0] = False
    mild = policy_of((1e-2, 1.05e-2, 1.2e-2, 1.5e-2))
    mild.plan(4, 4, 100.0)
    for _ in range(100):
        mild.observe_ranks(path, real)
    assert mild.choose_width(4, 4, 100.0, (4, 8, 16)) == 4


def drafter_of(kind, ref, shape):
    plans = {"right": right_tree, "wrong": wrong_tree, "malformed": random_tree}
    if kind in plans:
        return ScriptedDrafter(
            ref.sequences, plans[kind], ref.loaded.vocab_size, malform if kind == "malformed" else None
        )
    return eagle_drafter(ref.loaded, SHAPES[shape])


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
    assert policy.decisions.get("plain decoding is faster", 0) > policy.decisions.get("pays", 0)
