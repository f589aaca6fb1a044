"""Adaptive speculation in a whole engine: what it prunes stays a tree, and what is generated never changes."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    engine_config,
    generate,
    greedy_params,
    new_engine,
    reference,
)
from tests.runtime.scripted import (
    ScriptedDrafter,
    malform,
    random_tree,
    right_chain,
    right_tree,
    tree_tensors,
    well_formed,
    wrong_tree,
)
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine import calibration
from wingbeat.runtime.engine.adaptive import AdaptiveSpeculation
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.round.rows import Decodes
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.speculation.policy import SpeculationPolicy

pytestmark = pytest.mark.few(1)

SHAPES = {"chain": replace(CHAIN, adaptive=True), "tree": replace(TREE, adaptive=True)}


class FixedChoice:
    """A policy that keeps the nodes it is told to."""

    max_levels = 5

    def __init__(self, kept):
        self.kept = kept

    def choose_nodes(self, path, real, num_reqs, mean_context):
        return self.kept & real


def running(count):
    seqs = []
    for slot in range(count):
        seq = Sequence(Request(str(slot), (1, 2, 3), SamplingParams(max_tokens=8, temperature=0.0)))
        seq.slot = slot
        seqs.append(seq)
    return seqs


def closed_choice(chance, parents, num_valid):
    """A random set of nodes that holds every parent of its nodes."""
    kept = np.zeros(parents.shape, bool)
    for row, count in enumerate(num_valid):
        for node in range(1, count):
            up = parents[row, node]
            kept[row, node] = (up == 0 or kept[row, up]) and chance.random() < 0.7
    return kept


def paths(tree, row):
    """Token paths from the root of one tree, as a set."""
    found = {0: ()}
    for node in range(1, int(tree.num_valid[row])):
        found[node] = (*found[int(tree.parents[row, node])], int(tree.token_ids[row, node]))
    return sorted(found.values())


@pytest.mark.parametrize("seed", range(6))
def test_pruned_trees_hold_exactly_the_chosen_paths(seed, monkeypatch):
    import random

    chance, numbers = random.Random(seed), np.random.default_rng(seed)
    plans = [random_tree([5, 6, 7], 100, chance) for _ in range(5)]
    whole = tree_tensors([1, 2, 3, 4, 5], plans, 16)
    monkeypatch.setattr(FixedChoice, "max_levels", 16)
    kept = closed_choice(numbers, whole.parents.numpy(), whole.num_valid.tolist())
    pruned = AdaptiveSpeculation(FixedChoice(kept)).prune(whole, running(5), whole)
    if not kept.any():
        assert pruned is None
        return
    assert well_formed(pruned, 100)
    assert pruned.token_ids.shape[1] == int(pruned.num_valid.max())
    for row in range(5):
        number = {0: ()}
        for node in np.flatnonzero(kept[row]):
            number[node] = (*number[int(whole.parents[row, node])], int(whole.token_ids[row, node]))
        assert paths(pruned, row) == sorted(number.values())


def test_nodes_deeper_than_any_path_are_not_verified():
    whole = tree_tensors([1], [[(5, node) for node in range(7)]], 16)
    pruned = AdaptiveSpeculation(FixedChoice(whole.depths.numpy() > 0)).prune(whole, running(1), whole)
    assert paths(pruned, 0) == [(5,) * depth for depth in range(6)]


def test_nodes_that_a_request_has_no_room_for_are_not_verified():
    whole = tree_tensors([1, 2], [[(5, 0), (6, 1), (7, 0), (8, 2), (9, 4)]] * 2, 8)
    seqs = running(2)
    seqs[1].token_ids.extend([4] * 5)  # 3 more: the bonus token, and two of the tree at most
    pruned = AdaptiveSpeculation(FixedChoice(whole.depths.numpy() > 0)).prune(whole, seqs, whole)
    assert paths(pruned, 0) == paths(whole, 0)
    assert paths(pruned, 1) == [(), (5,), (5, 6), (7,)]
    seqs[1].token_ids.extend([4] * 2)
    pruned = AdaptiveSpeculation(FixedChoice(whole.depths.numpy() > 0)).prune(whole, seqs, whole)
    assert paths(pruned, 1) == [()]


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_no_round_verifies_more_than_the_request_may_still_emit(shape, monkeypatch):
    ref = reference("llama")
    drafter = ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size)
    engine = new_engine(ref.loaded, engine_config(SHAPES[shape]), drafter)
    seen = []
    prune = AdaptiveSpeculation.prune

    def watched(self, trees, decodes, drafted):
        pruned = prune(self, trees, decodes, drafted)
        if pruned is not None:
            tree = pruned.tree if isinstance(pruned, Decodes) else pruned
            depths = tree.depths.gather(1, (tree.num_valid - 1)[:, None])[:, 0].tolist()
            seen.extend((depth, 7 - seq.num_output_tokens) for depth, seq in zip(depths, decodes, strict=True))
        return pruned

    monkeypatch.setattr(AdaptiveSpeculation, "prune", watched)
    tokens = Run(engine, ref.prompts, greedy_params(7)).finish()
    assert tokens == [continuation[:7] for continuation in ref.continuations]
    assert all(depth < left for depth, left in seen)
    assert any(depth == left - 1 for depth, left in seen)
    engine.model.remove_taps()


def test_nothing_worth_verifying_is_no_tree():
    whole = tree_tensors([1, 2], [[(5, 0)], []], 4)
    assert AdaptiveSpeculation(FixedChoice(np.zeros((2, 4), bool))).prune(whole, running(2), whole) is None


def hostile(tree, chance):
    malform(tree, chance)
    tree.scores.copy_(
        torch.tensor([float("nan"), float("inf"), -float("inf"), 7.0])[torch.randint(4, tree.scores.shape)]
    )


def test_hostile_trees_and_scores_change_no_text():
    ref = reference("llama")
    drafter = ScriptedDrafter(ref.sequences, random_tree, ref.loaded.vocab_size, hostile)
    tokens, engine = generate(ref.loaded, engine_config(SHAPES["tree"]), drafter, ref.prompts, greedy_params())
    assert tokens == ref.continuations
    assert sum(engine.stats().policy.decisions.values()) > 0


def test_rounds_that_carry_prompts_correct_the_costs_too(monkeypatch):
    """Under load there may be no others."""
    ref = reference("llama")
    drafter = ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size)
    engine = new_engine(ref.loaded, engine_config(SHAPES["chain"], max_num_seqs=2), drafter)
    flights, costs = [], []
    settled = AdaptiveSpeculation.settled
    monkeypatch.setattr(
        AdaptiveSpeculation, "settled", lambda self, *round_: (flights.append(round_[0]), settled(self, *round_))
    )
    observe = engine.policy.current.policy.costs.observe
    engine.policy.current.policy.costs.observe = lambda took: (costs.append(took), observe(took))
    Run(engine, ref.prompts, greedy_params(6)).finish()
    assert sum(took.num_chunk_tokens for took in costs) > 0
    assert sum(chunk.length for flight in flights for chunk in flight.plan.chunks) == sum(map(len, ref.prompts))
    assert all(flight.times.forward_s > 0 and flight.times.host_s > 0 for flight in flights)
    engine.model.remove_taps()


@pytest.mark.slow
@pytest.mark.usefixtures("known_costs")
def test_good_drafts_are_taken_and_hopeless_ones_given_up():
    ref = reference("llama")
    config = engine_config(SHAPES["tree"])
    stats = {}
    for name, plan in (("right", right_tree), ("wrong", wrong_tree)):
        drafter = ScriptedDrafter(ref.sequences, plan, ref.loaded.vocab_size)
        engine = new_engine(ref.loaded, config, drafter)
        for _ in range(3):  # what is known beforehand weighs as much as a hundred tries
            assert Run(engine, ref.prompts, greedy_params()).finish() == ref.continuations
        engine.model.remove_taps()
        stats[name] = engine.stats().policy
    right, wrong = stats["right"], stats["wrong"]
    assert right.expected_accepted == pytest.approx(right.num_accepted, rel=0.35)
    assert wrong.num_accepted == 0
    assert right.decisions.get("speculate", 0) > right.decisions.get("plain", 0)
    assert wrong.decisions.get("plain", 0) > wrong.decisions.get("speculate", 0)


class CountingDrafter(ScriptedDrafter):
    """Counts what it is rung for and checks that the pairs of each sequence follow one another."""

    def __init__(self, *args):
        super().__init__(*args)
        self.needs = DrafterNeeds((1,), keeps_context=True)
        self.counts = False
        self.num_passes = self.num_chunk_tokens = 0
        self.ends = {}

    def commit(self, batch):
        if not self.counts:  # the calibration's rows belong to no sequence
            return
        self.num_passes += 1
        self.num_chunk_tokens += sum(batch.chunk_lens)
        history = batch.token_ids
        row = 0
        for slot, start, count in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            assert start in (0, self.ends.get(slot))
            self.ends[slot] = start + count
            known = history[slot, start + 1 : start + count + 1]
            assert torch.equal(batch.chunk_next_token_ids[row : row + count], known)
            row += count
        decodes = (batch.decode_slots, batch.decode_positions, batch.decode_num_tokens)
        for slot, start, count in zip(*(column.tolist() for column in decodes), strict=True):
            assert start == self.ends[slot]
            self.ends[slot] = start + count


class NeverPays(SpeculationPolicy):
    """Plain decoding, but for a draft every `every` rounds."""

    every = 40
    rounds = 0

    def plan(self, *load):
        self.rounds += 1
        return super().plan(*load)._replace(levels=0 if self.rounds % self.every else self.max_levels)


@pytest.mark.parametrize("overlap", [False, True])
def test_plain_rounds_are_kept_back_and_handed_over_in_order(monkeypatch, overlap):
    monkeypatch.setattr("wingbeat.runtime.engine.measured.SpeculationPolicy", NeverPays)
    ref = reference("llama")
    drafter = CountingDrafter(ref.sequences, right_tree, ref.loaded.vocab_size)
    config = engine_config(SHAPES["tree"], overlap=overlap, max_num_seqs=4)
    engine = new_engine(ref.loaded, config, drafter)
    drafter.counts = True
    run = Run(engine, ref.prompts[:4], greedy_params())
    tokens = run.finish()
    engine.model.remove_taps()
    assert tokens == ref.continuations[:4]
    rounds = engine.stats().phases.num_rounds
    assert drafter.num_passes < rounds / 3
    assert engine.stats().speculation.num_drafts > 0
    # Every pair was given as part of a chunk or of a decode row, but for those still kept back at the end.
    assert drafter.num_chunk_tokens > sum(len(prompt) for prompt in ref.prompts[:4])


def test_mixed_batches_give_each_request_its_plain_text():
    ref = reference("llama")
    params = [greedy_params(speculation=index % 2 == 0) for index in range(len(ref.prompts))]
    drafter = ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size)
    tokens, _ = generate(ref.loaded, engine_config(SHAPES["chain"]), drafter, ref.prompts, params)
    assert tokens == ref.continuations


def test_a_silent_drafter_leaves_fixed_trees(monkeypatch, caplog):
    monkeypatch.setattr("wingbeat.runtime.engine.measured.draft_curve", lambda *args: None)
    ref = reference("llama")
    drafter = ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size)
    with caplog.at_level(logging.WARNING):
        tokens, engine = generate(ref.loaded, engine_config(SHAPES["chain"]), drafter, ref.prompts, greedy_params())
    assert "fixed trees" in caplog.text
    assert tokens == ref.continuations
    assert engine.stats().policy is None


class SlowModel:
    """A verifier whose passes take a set time: 10 ms and a share of each row, by a clock of its own."""

    def __init__(self, row_s: float) -> None:
        self.row_s, self.now, self.rows = row_s, 0.0, []

    def __call__(self, batch):
        self.rows.append(batch.token_ids.numel())
        self.now += 0.01 + self.row_s * self.rows[-1]

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("row_s", "most"), [(1e-4, 64), (5e-3, 64), (2.0, 4)])
def test_a_host_is_measured_at_four_sizes_and_the_slower_the_fewer(monkeypatch, row_s, most):
    model = SlowModel(row_s)
    monkeypatch.setattr(calibration, "time", model)
    ref = reference("llama")
    config = engine_config(SHAPES["tree"], max_num_seqs=16)
    cache = KVCache(ref.loaded.layers, config, torch.float32, torch.device("cpu"))
    curve = calibration.pass_curve(model, cache, config)
    assert curve.rows == tuple(count for count in (1, 4, 16, 64) if count <= most)
    assert len(model.rows) == calibration.REPEATS * (len(curve.rows) + 4)
    # Beyond the largest pass too.
    rows = np.array([1, 3, 50, 200])
    assert curve.seconds(1, rows - 1, 700.0) == pytest.approx(0.01 + row_s * rows, rel=1e-6)


def test_no_pass_takes_longer_than_one_of_more_rows(monkeypatch):
    ref, taken = reference("llama"), iter([3.0, 2.0, 4.0, 9.0, *[1.0] * 4])
    monkeypatch.setattr(calibration, "_least_s", lambda run: next(taken))
    monkeypatch.setattr(calibration, "HOST_PASS_S", 1e9)
    config = engine_config(SHAPES["tree"], max_num_seqs=16)
    cache = KVCache(ref.loaded.layers, config, torch.float32, torch.device("cpu"))
    assert calibration.pass_curve(None, cache, config).short_s == (2.0, 2.0, 4.0, 9.0)


def test_no_pass_is_measured_at_positions_that_a_sequence_cannot_have(monkeypatch):
    ref, last = reference("llama"), []
    config = engine_config(SHAPES["tree"], block_size=256, max_model_len=64)
    monkeypatch.setattr(calibration, "_least_s", lambda run: last.append(int(run().positions.max())) or 1.0)
    cache = KVCache(ref.loaded.layers, config, torch.float32, torch.device("cpu"))
    calibration.pass_curve(lambda batch: batch, cache, config)
    assert max(last) < config.max_blocks_per_seq * config.block_size


def test_what_a_longer_context_adds_is_measured_by_sequence_and_by_row(monkeypatch):
    def least_s(run):
        batch = run()
        (rows,) = batch.segments
        num_reqs, num_nodes = rows.num_reqs, rows.num_query
        context = rows.block_tables.shape[1] * 4
        return 1e-6 * context * (5 * num_reqs + 2 * num_reqs * (num_nodes - 1))

    ref = reference("llama")
    monkeypatch.setattr(calibration, "_least_s", least_s)
    config = engine_config(SHAPES["tree"], max_num_seqs=16, block_size=4)
    cache = KVCache(ref.loaded.layers, config, torch.float32, torch.device("cpu"))
    curve = calibration.pass_curve(lambda batch: batch, cache, config)
    assert curve.context_s == pytest.approx((5e-6, 2e-6))
