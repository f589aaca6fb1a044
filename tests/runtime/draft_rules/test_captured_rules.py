"""Captured drafts apply sampling rules like eager passes on the host; requests without rules do not pay for them."""

from itertools import pairwise

import pytest
import torch

from tests.runtime.draft_world import MIXED, NUM_SLOTS, VOCAB
from tests.runtime.drafters.test_draft_stages import (  # noqa: F401
    GREEDY,
    attached,
    by_kind,
    by_shape,
    couplings_of_a_device,
    few_batches,
    kinds,
    new_world,
)
from tests.runtime.drafters.test_eagle_stages import a_round, assert_same, new_drafter
from tests.runtime.drafters.test_eagle_stages import new_world as stages_world
from tests.runtime.models import TREE
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.rule_rows import rules_of
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.sampling_rules import RuleKinds, no_rules

pytestmark = pytest.mark.few(1)


def masks_of(count, seed):
    """Masks of roots: half of the tokens may follow, and all tokens may follow the last root."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.randint(-(2**31), 2**31, (count, -(-VOCAB // 32)), generator=generator).to(torch.int32)
    masks[-1] = -1
    return masks


@pytest.mark.few(1)
@pytest.mark.parametrize("temperatures", [GREEDY, MIXED], ids=["greedy", "sampled"])
@by_shape
@by_kind
@torch.inference_mode()
def test_replays_draft_the_trees_of_eager_passes(kinds, kind, speculation, temperatures, monkeypatch):  # noqa: F811
    """Rules and masks come and go between replays of the same graphs; so do the slots that have them."""
    few_batches(monkeypatch)
    eager, captured = attached(kinds, kind, speculation), attached(kinds, kind, speculation, RecordingDevice())
    world = new_world(eager, temperatures)
    for drafter in (eager, captured):
        world.feed(drafter)
    rules = rules_of(NUM_SLOTS)
    swapped = type(rules)(*(part.flip(0).contiguous() for part in rules))
    slots, trees = world.slots[1:], []
    rounds = (
        (rules, None),
        (None, masks_of(7, 1)),
        (swapped, masks_of(7, 2)),
        (no_rules(NUM_SLOTS), None),
        (rules, None),
    )
    for told, masks in rounds:
        batch = world.batch(proposals=slots)._replace(sampling_rules=told, allowed_tokens=masks)
        expected = eager.draft(batch)
        assert_same(captured.draft(batch), expected, 1e-4)
        trees.append(expected.token_ids.tolist())
    assert all(one != other for one, other in pairwise(trees))
    free = world.batch(proposals=slots)
    assert_same(captured.draft(free), eager.draft(free), 1e-4)
    stats = captured.graph_stats
    assert stats.failed == []
    assert not stats.eager_runs
    assert stats.replays == {
        Stage.DRAFT_RULED: len(rounds),
        Stage.DRAFT_PROPOSAL: 1,
        Stage.DRAFT_ACCEPT: 1,
        Stage.DRAFT_PREFILL: 2,
    }


@pytest.mark.slow
@by_shape
@torch.inference_mode()
def test_few_of_a_batch_have_rules_and_none_of_those_that_are_only_decided(speculation, monkeypatch):
    """Batches of two are padded; another sequence only commits tokens. The head's vocabulary is half the target's."""
    few_batches(monkeypatch)
    eager, captured = new_drafter(speculation), new_drafter(speculation, RecordingDevice())
    assert captured.growth.rules.columns.size < VOCAB
    world = stages_world(eager, MIXED)
    for drafter in (eager, captured):
        world.feed(drafter)
    rules, (one, other) = rules_of(NUM_SLOTS), world.slots[:2]
    for slots, deciding in (((one,), other), ((other,), one), ((one, other), one)):
        decode = (deciding, int(world.lens[deciding]) - 1, 1)
        world.lens[deciding] += 1
        batch = world.batch(decodes=[decode], proposals=list(slots), max_levels=2)
        batch = batch._replace(sampling_rules=rules, allowed_tokens=masks_of(len(slots), 5))
        assert_same(captured.draft(batch), eager.draft(batch), 1e-4)


@pytest.mark.slow
@torch.inference_mode()
def test_tables_by_token_are_written_where_somebody_needs_them_alone(kinds, monkeypatch):  # noqa: F811
    """Values written for a sequence do not affect the next sequence in its row."""
    few_batches(monkeypatch)
    eager, captured = attached(kinds, "eagle", TREE), attached(kinds, "eagle", TREE, RecordingDevice())
    world = new_world(eager, MIXED)
    for drafter in (eager, captured):
        world.feed(drafter)
    tables, every = captured._stages._rules, rules_of(NUM_SLOTS)
    for kinds_told in (RuleKinds.every(), RuleKinds.NUMBERS, RuleKinds.LISTED | 1, RuleKinds.PENALTIES | 1):
        told = type(every)(*(part.clone() for part in every))
        if RuleKinds.PENALTIES not in kinds_told:
            told.numbers[:, 3:6] = torch.tensor([1.0, 0.0, 0.0])
        if RuleKinds.LISTED not in kinds_told:
            told.numbers[:, -1], told.token_ids[:] = 0.0, -1
        batch = world.batch(proposals=world.slots)._replace(sampling_rules=told, rule_kinds=kinds_told)
        tables._biases.table.fill_(7.0)
        tables._counts.in_output.fill_(7)
        assert_same(captured.draft(batch), eager.draft(batch._replace(rule_kinds=RuleKinds.every())), 1e-4)
        assert bool((tables._biases.table == 7.0).all()) == (RuleKinds.LISTED not in kinds_told)
        assert bool((tables._counts.in_output == 7).all()) == (RuleKinds.PENALTIES not in kinds_told)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@by_shape
@torch.inference_mode()
def test_a_gpu_drafts_the_trees_of_the_cpu_and_nobody_waits(speculation, captured):
    cuda = torch.device("cuda", 0)
    today = new_drafter(speculation)
    drafter = new_drafter(speculation, CudaGraphDevice(cuda) if captured else None, device=cuda)
    world = stages_world(today, MIXED)
    world.feed(today)
    world.feed(drafter, cuda)
    ruled = {"sampling_rules": rules_of(NUM_SLOTS), "allowed_tokens": masks_of(5, 1)}
    on_gpu = {"sampling_rules": type(ruled["sampling_rules"])(*(part.to(cuda) for part in ruled["sampling_rules"]))}
    on_gpu["allowed_tokens"] = ruled["allowed_tokens"].to(cuda)
    batch = a_round(world, world.slots[:5], None, cuda)._replace(**on_gpu)
    drafter.draft(batch)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree = drafter.draft(batch)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    expected = today.draft(a_round(world, world.slots[:5], None)._replace(**ruled))
    assert_same(TokenTree(*(part.cpu() for part in tree)), expected, 1e-3)
    stats = drafter.graph_stats
    assert (stats is not None) == captured
    assert stats is None or (stats.replays[Stage.DRAFT_RULED] and not stats.failed)
