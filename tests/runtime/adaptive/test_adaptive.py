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
    wrong_tree,
)
from wingbeat.runtime.adaptive import calibration
from wingbeat.runtime.kv.pool import KVCache

pytestmark = pytest.mark.few(1)

SHAPES = {"chain": replace(CHAIN, adaptive=True), "tree": replace(TREE, adaptive=True)}


def paths(tree, row):
    """Token paths from the root of one tree, as a set."""
    found = {0: ()}
    for node in range(1, int(tree.num_valid[row])):
        found[node] = (*found[int(tree.parents[row, node])], int(tree.token_ids[row, node]))
    return sorted(found.values())


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


@pytest.mark.slow
@pytest.mark.usefixtures("known_costs")
def test_good_drafts_are_taken_and_hopeless_ones_given_up():
    ref = reference("llama")
    config = engine_config(SHAPES["tree"])
    stats = {}
    for name, plan in (("right", right_tree), ("wrong", wrong_tree)):
        drafter = ScriptedDrafter(ref.sequences, plan, ref.loaded.vocab_size)
        engine = new_engine(ref.loaded, config, drafter)
        for _ in range(3):  # the prior weighs as much as a hundred observations
            assert Run(engine, ref.prompts, greedy_params()).finish() == ref.continuations
        engine.model.remove_taps()
        stats[name] = engine.stats().policy
    right, wrong = stats["right"], stats["wrong"]
    assert right.expected_accepted == pytest.approx(right.num_accepted, rel=0.35)
    assert wrong.num_accepted == 0
    assert right.decisions.get("speculate", 0) > right.decisions.get("plain", 0)
    assert wrong.decisions.get("plain", 0) > wrong.decisions.get("speculate", 0)


def test_mixed_batches_give_each_request_its_plain_text():
    ref = reference("llama")
    params = [greedy_params(speculation=index % 2 == 0) for index in range(len(ref.prompts))]
    drafter = ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size)
    tokens, _ = generate(ref.loaded, engine_config(SHAPES["chain"]), drafter, ref.prompts, params)
    assert tokens == ref.continuations


def test_a_silent_drafter_leaves_fixed_trees(monkeypatch, caplog):
    monkeypatch.setattr("wingbeat.runtime.adaptive.measured.draft_curve", lambda *args: None)
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


@pytest.mark.parametrize(("row_s", "most", "runs"), [(1e-4, 64, 3), (1e-2, 64, 2), (2.0, 4, 2)])
def test_a_host_is_measured_at_four_sizes_and_the_slower_the_fewer(monkeypatch, row_s, most, runs):
    model = SlowModel(row_s)
    monkeypatch.setattr(calibration, "time", model)
    ref = reference("llama")
    config = engine_config(SHAPES["tree"], max_num_seqs=16)
    cache = KVCache(ref.loaded.layers, config, torch.float32, torch.device("cpu"))
    curve = calibration.pass_curve(model, cache, config)
    assert curve.rows == tuple(count for count in (1, 4, 16, 64) if count <= most)
    assert len(model.rows) == runs * (len(curve.rows) + 4), "one that warms up, then until they add up to LONG_S"
    # Rows include counts beyond the largest measured pass.
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


def test_a_measured_context_lies_in_blocks_of_its_own_that_stay_as_they_are(monkeypatch):
    """A block that is read again and again stays in the caches, where no real context is."""
    tables = []
    monkeypatch.setattr(calibration, "_least_s", lambda run: tables.append(run().segments[0].block_tables) or 1.0)
    ref = reference("llama")
    config = engine_config(SHAPES["tree"], max_num_seqs=2, block_size=4, max_model_len=256)
    cache = KVCache(ref.loaded.layers, config, torch.float32, torch.device("cpu"))
    for keys, values in cache.layers:
        keys.normal_()
        values.normal_()
    before = [held.clone() for layer in cache.layers for held in layer]
    calibration.pass_curve(lambda batch: batch, cache, config)
    widest = max(tables, key=lambda table: table.shape[1])[0].tolist()
    assert len(set(widest)) > len(widest) / 2
    assert widest[-1] == 0, "rows are written to the null block"
    now = [held for layer in cache.layers for held in layer]
    assert all(torch.equal(*pair) for pair in zip(before, now, strict=True))
