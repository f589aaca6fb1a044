"""Adaptive speculation in a CPU's round: the nodes that are verified, and the costs that are learned from rounds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.runtime.adaptive.test_adaptive import paths
from tests.runtime.models import CHAIN, TREE, Run, engine_config, greedy_params, new_engine, reference
from tests.runtime.scripted import ScriptedDrafter, right_chain, tree_tensors
from wingbeat.kernels.cpu.drafted import Shape, SlotTensors
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.cpu.adaptive.host_speculation import HostSpeculation
from wingbeat.runtime.cpu.round.host_trees import HostTrees
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.scheduling.sequence import Sequence

pytestmark = [pytest.mark.few(1), pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")]
SHAPES = {"chain": replace(CHAIN, adaptive=True), "tree": replace(TREE, adaptive=True)}


class Priced:
    """A policy with a fixed price per node, in tokens."""

    max_levels = 5

    def __init__(self, price):
        self.price = price

    def prices(self, num_reqs, most, mean_context):
        return self.price * np.arange(most + 1.0)


def running(count):
    seqs = []
    for slot in range(count):
        seq = Sequence(Request(str(slot), (1, 2, 3), SamplingParams(max_tokens=8, temperature=0.0)))
        seq.slot = slot
        seqs.append(seq)
    return seqs


def verified(whole, seqs, price=0.0):
    config = engine_config(SHAPES["tree"])
    state = SlotState(config, 100, torch.device("cpu"))
    present = SlotTensors(*(getattr(state, name) for name in SlotTensors._fields))
    intake = cpu_kernels().draft_intake(present, Shape(100, False, config.block_size, 100))
    trees = HostTrees.of_checked(intake, torch.arange(len(seqs)), whole)
    chosen = HostSpeculation(Priced(price)).prune(trees, seqs, trees)
    return None if chosen is None else chosen.verified()


def test_nodes_deeper_than_any_path_are_not_verified():
    whole = tree_tensors([1], [[(5, node) for node in range(7)]], 16)
    assert paths(verified(whole, running(1)), 0) == [(5,) * depth for depth in range(6)]


def test_nodes_that_a_request_has_no_room_for_are_not_verified():
    whole = tree_tensors([1, 2], [[(5, 0), (6, 1), (7, 0), (8, 2), (9, 4)]] * 2, 8)
    seqs = running(2)
    seqs[1].token_ids.extend([4] * 5)  # room for 3 more tokens: the bonus token, and two of the tree at most
    trees = verified(whole, seqs)
    assert paths(trees, 0) == paths(whole, 0)
    assert paths(trees, 1) == [(), (5,), (5, 6), (7,)]
    seqs[1].token_ids.extend([4] * 2)
    assert paths(verified(whole, seqs), 1) == [()]


def test_nothing_worth_verifying_is_no_tree():
    whole = tree_tensors([1, 2], [[(5, 0)], []], 4)
    assert verified(whole, running(2), price=2.0) is None


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_no_round_verifies_more_than_the_request_may_still_emit(shape, monkeypatch):
    ref = reference("llama")
    drafter = ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size)
    engine = new_engine(ref.loaded, engine_config(SHAPES[shape]), drafter)
    seen = []
    prune = HostSpeculation.prune

    def watched(self, trees, decodes, drafted):
        pruned = prune(self, trees, decodes, drafted)
        if pruned is not None and pruned.verified() is not None:
            tree = pruned.verified()
            depths = tree.depths.gather(1, (tree.num_valid - 1)[:, None])[:, 0].tolist()
            seen.extend((depth, 7 - seq.num_output_tokens) for depth, seq in zip(depths, decodes, strict=True))
        return pruned

    monkeypatch.setattr(HostSpeculation, "prune", watched)
    tokens = Run(engine, ref.prompts, greedy_params(7)).finish()
    assert tokens == [continuation[:7] for continuation in ref.continuations]
    assert all(depth < left for depth, left in seen)
    assert any(depth == left - 1 for depth, left in seen)
    engine.model.remove_taps()


def test_rounds_that_carry_prompts_correct_the_costs_too(monkeypatch):
    """Under load there may be no rounds without prompts."""
    ref = reference("llama")
    drafter = ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size)
    engine = new_engine(ref.loaded, engine_config(SHAPES["chain"], max_num_seqs=2), drafter)
    flights, costs = [], []
    settled = HostSpeculation.settled
    monkeypatch.setattr(
        HostSpeculation, "settled", lambda self, *round_: (flights.append(round_[0]), settled(self, *round_))
    )
    observe = engine.policy.current.policy.costs.observe
    engine.policy.current.policy.costs.observe = lambda took: (costs.append(took), observe(took))
    Run(engine, ref.prompts, greedy_params(6)).finish()
    assert sum(took.num_chunk_tokens for took in costs) > 0
    assert sum(chunk.length for flight in flights for chunk in flight.plan.chunks) == sum(map(len, ref.prompts))
    assert all(flight.times.forward_s > 0 and flight.times.host_s > 0 for flight in flights)
    engine.model.remove_taps()
