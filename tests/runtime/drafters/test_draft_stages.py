"""Captured drafts of every kind with weights equal its eager drafts, in any batch and depth, as sequences come and go.

A captured stage is replayed as the operations that were recorded, on the same memory, or by calling its function again.
"""

import logging
import weakref
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch

from tests.optional import is_gone
from tests.runtime.draft_world import BLOCK_SIZE, MAX_LEN, MIXED, NUM_SLOTS, World, channel_spec, taps_size
from tests.runtime.drafter_kinds import KINDS as TEXT_KINDS
from tests.runtime.drafters.test_eagle_stages import a_round, assert_same
from tests.runtime.feature_kinds import of_features
from tests.runtime.graphs.test_graph_runner import FakeDevice
from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    engine_config,
    greedy_params,
    random_head,
    reference,
)
from tests.runtime.poisoned_graphs import PoisoningDevice
from tests.runtime.recorded_graphs import RecordingDevice, RepeatingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.kernels.tree.results import Coupling
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters import draft_stages, growth
from wingbeat.runtime.drafters.choice import KINDS as BY_NAME
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.registry import kind_of
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.llm import build_engine, connect
from wingbeat.runtime.protocol.messages import TokenTree

pytestmark = pytest.mark.few(1)

LENS = (2, 9, 17, 40, 1 + BLOCK_SIZE, 2 * BLOCK_SIZE, 33, MAX_LEN - 8)
SHAPES = {"chain": CHAIN, "tree": TREE}
GREEDY = (0.0,) * NUM_SLOTS
ONE_PASS = ("dflash", "dspark-rnn", "dflash2")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """(kind, shape, graph device) -> drafter; weights are loaded once."""

    @cache
    def deep_head():
        one_layer = random_head(reference("llama").loaded)
        torch.manual_seed(3)
        head = EagleHead(replace(one_layer.config, num_layers=2))
        head.load_state_dict(one_layer.state_dict(), strict=False)
        return head.eval().requires_grad_(False)

    @cache
    def of_kind(kind: str):
        return of_features("CAPTURED")[kind](tmp_path_factory.mktemp)

    def make(kind, speculation, device):
        if kind in ("eagle", "deep-eagle"):
            head = deep_head() if kind == "deep-eagle" else random_head(reference("llama").loaded)
            return EagleDrafter(head, speculation, device)
        return of_kind(kind)(speculation, device)

    return make


KINDS = (
    *("eagle", "draft-model", "draft-model-windows", "foreign-vocabulary", "mtp-1", "mtp-3", "shared_keys", "p-eagle"),
    *ONE_PASS,
)
by_kind = pytest.mark.parametrize("kind", KINDS)
by_shape = pytest.mark.parametrize("speculation", SHAPES.values(), ids=SHAPES.keys())


@pytest.fixture(autouse=True)
def couplings_of_a_device(monkeypatch):
    """Couple drafts to the noise as on a device; on the host a growth first checks whether any request is sampled."""

    def couplings(roots):
        return [Coupling(roots.temperatures, roots.seeds, positions) for positions in roots.positions]

    monkeypatch.setattr(growth, "couplings_of", couplings)


def attached(kinds, kind, speculation, device=None):
    drafter = kinds(kind, speculation, device)
    spec = channel_spec(speculation, taps_size(drafter))
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    return drafter


def new_world(drafter, temperatures=MIXED):
    return World(drafter.speculation, taps_size(drafter), LENS, temperatures)


def few_batches(monkeypatch):
    """Limit captures to batches of 1, 2 and all slots, because recording and replaying on the host is slow."""

    def batches(num_slots, *shape):
        return (1, 2, num_slots)

    monkeypatch.setattr(draft_stages, "draft_batches", batches)


@pytest.mark.few(1)
@pytest.mark.parametrize("temperatures", [GREEDY, MIXED], ids=["greedy", "sampled"])
@by_shape
@by_kind
@torch.inference_mode()
def test_replays_draft_the_trees_of_eager_passes(kinds, kind, speculation, temperatures, monkeypatch):
    """At batches of 1, 2 and 8 and several depths, while sequences grow by different numbers of tokens."""
    few_batches(monkeypatch)
    speculation = replace(speculation, draft_steps=3)
    eager, captured = attached(kinds, kind, speculation), attached(kinds, kind, speculation, RecordingDevice())
    world = new_world(eager, temperatures)
    for drafter in (eager, captured):
        world.feed(drafter)
    num_trees = 0
    for count, depth in ((8, 3), (1, 1), (2, 3), (8, 2), (1, 3)):
        slots = world.slots[-count:]
        decodes = [(slot, int(world.lens[slot]) - 1, 1 + (slot + num_trees) % 2) for slot in slots]
        for slot, _, more in decodes:
            world.lens[slot] += more
        batch = world.batch(decodes=decodes, proposals=slots, max_levels=depth)
        assert_same(captured.draft(batch), eager.draft(batch), 1e-4)
        num_trees += 1
    stats = captured.graph_stats
    assert eager.graph_stats is None
    assert stats.failed == []
    assert not stats.eager_runs
    assert stats.replays == {Stage.DRAFT_PROPOSAL: num_trees, Stage.DRAFT_ACCEPT: 1, Stage.DRAFT_PREFILL: 2}


@pytest.mark.slow
@by_shape
@pytest.mark.parametrize("kind", [*KINDS, "deep-eagle"])
@torch.inference_mode()
def test_the_shortest_sequences_are_drafted_for_alike(kinds, kind, speculation, monkeypatch):
    """Sequences of two to six tokens, with and without earlier rows, in memory full of other sequences' rows."""
    monkeypatch.setattr(draft_stages, "draft_batches", lambda *sizes: (5,))
    speculation = replace(speculation, draft_steps=5)
    drafters = [attached(kinds, kind, speculation), attached(kinds, kind, speculation, FakeDevice())]
    worlds = [World(speculation, taps_size(drafter), (2, 3, 4, 5, 6), MIXED) for drafter in drafters]
    for drafter, world in zip(drafters, worlds, strict=True):
        for part in (*(part for pair in drafter.pool.caches for part in pair), *getattr(drafter.pool, "extras", ())):
            part.fill_(50.0)
        world.feed(drafter)
    for more in (0, 1, 2):
        trees = []
        for drafter, world in zip(drafters, worlds, strict=True):
            decodes = [(slot, int(world.lens[slot]) - 1, more) for slot in world.slots if more]
            world.lens[world.slots] += more
            trees.append(drafter.draft(world.batch(decodes=decodes, proposals=world.slots)))
        assert_same(trees[1], trees[0], 1e-4)


@pytest.mark.slow
@by_shape
@by_kind
@torch.inference_mode()
def test_sequences_come_and_go(kinds, kind, speculation, monkeypatch):
    """A prompt's last chunk, a decode with a draft and one without share a pass; then a slot changes its sequence."""
    few_batches(monkeypatch)
    drafters = [attached(kinds, kind, speculation), attached(kinds, kind, speculation, FakeDevice())]
    trees = []
    for drafter in drafters:
        world = new_world(drafter)
        short, decoding, ending, other = world.slots[1:5]
        lens = world.lens.tolist()
        assert drafter.draft(world.batch(chunks=[(slot, 0, lens[slot] - 3) for slot in (decoding, ending)])) is None
        world.lens[ending] -= 1
        assert drafter.draft(world.batch(decodes=[(ending, lens[ending] - 3, 1)])) is None
        world.lens[ending] += 1
        batch = world.batch(
            decodes=[(decoding, lens[decoding] - 3, 2), (ending, lens[ending] - 2, 1)],
            chunks=[(short, 0, lens[short] - 1)],
            proposals=[short, decoding],
        )
        found = [part.clone() for part in drafter.draft(batch)]
        found += [part.clone() for part in drafter.propose(world.batch(proposals=[ending]))]
        for name in ("lens", "tables", "tokens", "taps"):
            getattr(world, name)[ending] = getattr(world, name)[other].clone()
        batch = world.batch(chunks=[(ending, 0, lens[other] - 1)], proposals=[ending, short])
        trees.append([*found, *(part.clone() for part in drafter.draft(batch))])
        by_slot = drafter.trees_by_slot
        if by_slot is not None:
            assert torch.equal(by_slot.token_ids[ending], trees[-1][-5][0])
    for mine, expected in zip(trees[1], trees[0], strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@by_shape
@by_kind
@torch.inference_mode()
def test_padding_and_drafted_rows_touch_nothing_committed(kinds, kind, speculation, monkeypatch):
    """With three of nine rows drafted for, everything stored for committed tokens of any sequence stays unchanged."""
    few_batches(monkeypatch)
    drafter = attached(kinds, kind, speculation, FakeDevice())
    world = new_world(drafter)
    world.feed(drafter)
    slots = world.slots[2:5]
    # With L settled tokens, module k has L - 1 - k rows, whose results the next module reads.
    behind = range(drafter.num_modules) if kind.startswith("mtp") else [0] * len(drafter.pool.caches)
    stored = [(part, lag) for pair, lag in zip(drafter.pool.caches, behind, strict=True) for part in pair]
    stored += list(zip(getattr(drafter.pool, "extras", ()), behind, strict=False))
    before = [part.clone() for part, _ in stored]
    tree = TokenTree(*(part.clone() for part in drafter.draft(world.batch(proposals=slots))))
    for old, (new, lag) in zip(before, stored, strict=True):
        for slot in range(NUM_SLOTS):
            whole = world.tables.shape[1] * BLOCK_SIZE
            index = torch.arange(max(int(world.lens[slot]) - 1 - lag, 0) if slot in slots else whole)
            blocks, rows = world.tables[slot, index // BLOCK_SIZE], index % BLOCK_SIZE
            assert torch.equal(old[blocks, rows], new[blocks, rows])
    assert_same(drafter.draft(world.batch(proposals=slots)), tree)


@by_kind
@torch.inference_mode()
def test_a_capture_that_fails_drafts_eagerly_and_says_which(kinds, kind, caplog, monkeypatch):
    few_batches(monkeypatch)
    with caplog.at_level(logging.WARNING):
        # Fail the graph for the largest batch at some depth, or for batch 2 of kinds that draft in one pass.
        whole = kind in ("p-eagle", *ONE_PASS)
        drafter = attached(kinds, kind, CHAIN, FakeDevice(failing=lambda capture: capture == (8 if whole else 4)))
    eager = attached(kinds, kind, CHAIN)
    world = new_world(eager)
    for each in (drafter, eager):
        world.feed(each)
    for depth in range(1, CHAIN.max_path):
        batch = a_round(world, world.slots[1 : 3 if whole and depth == 1 else None], depth)
        assert_same(drafter.draft(batch), eager.draft(batch), 1e-4)
    stats = drafter.graph_stats
    [warning] = [message for message in caplog.messages if "runs eagerly" in message]
    [failure] = stats.failed
    assert f"{failure.stage}, bucket {failure.bucket}" in warning
    assert stats.eager_runs == {failure.stage: 1}
    assert stats.replays[Stage.DRAFT_PROPOSAL] > 0


@pytest.mark.slow
@by_kind
@torch.inference_mode()
def test_graphs_are_captured_anew_where_addresses_move_and_only_there(kinds, kind, monkeypatch):
    few_batches(monkeypatch)
    device = FakeDevice()
    drafter, eager = attached(kinds, kind, TREE, device), attached(kinds, kind, TREE)
    world = new_world(eager)
    for each in (drafter, eager):
        world.feed(each)
    spec, num_captures = channel_spec(TREE, taps_size(drafter)), device.num_captures
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    drafter.resize(replace(spec, num_slots=1, num_blocks=1), 1, 1)
    assert device.num_captures == num_captures
    drafter.resize(spec, spec.num_slots + 3, 2 * spec.num_blocks)
    assert device.num_captures == 2 * num_captures
    batch = a_round(world, world.slots[:5], None)
    assert_same(drafter.draft(batch), eager.draft(batch), 1e-4)
    drafter.resize(replace(spec, max_blocks_per_seq=spec.max_blocks_per_seq + 1), spec.num_slots, spec.num_blocks)
    assert device.num_captures == 3 * num_captures


@pytest.mark.slow
@torch.inference_mode()
def test_graphs_are_gone_before_others_are_captured(kinds, monkeypatch):
    few_batches(monkeypatch)
    drafter = attached(kinds, "eagle", CHAIN, RecordingDevice())
    spec, before, seen = channel_spec(CHAIN, taps_size(drafter)), weakref.ref(drafter._stages), []
    monkeypatch.setattr(drafter._graph_device, "new_pool", lambda: seen.append(before()) or 0)
    drafter.resize(spec, spec.num_slots + 1, spec.num_blocks)
    assert seen == [None]


@pytest.mark.slow
def test_shapes_of_one_level_are_captured_too(kinds):
    """Trees of one level, whose drafts have no rows of drafted tokens, are captured and replayed as well."""
    shape = SpeculationConfig(1, 3, 3)
    for kind in (kind for kind in KINDS if not is_gone(kind)):
        drafter = attached(kinds, kind, shape, FakeDevice())
        world = new_world(drafter)
        eager = attached(kinds, kind, shape)
        with torch.inference_mode():
            for each in (drafter, eager):
                world.feed(each)
            batch = a_round(world, world.slots[:3], None)
            assert_same(drafter.draft(batch), eager.draft(batch), 1e-4)


@pytest.mark.slow
@pytest.mark.few(1)
@by_shape
@pytest.mark.parametrize("kind", ["draft_model", "mtp", "shared_keys", "eagle1", "dflash", "dflash2", "peagle"])
def test_the_text_is_that_of_generate_whoever_captures_and_whoever_is_lost(kind, speculation, tmp_path, monkeypatch):
    """There are more requests than slots; one drafter is lost on the way, and the next one gets all contexts."""
    few_batches(monkeypatch)
    devices = [PoisoningDevice(RepeatingDevice()) for _ in range(2)]
    waiting = iter(devices)
    made = TEXT_KINDS[kind](tmp_path)
    module = import_module(BY_NAME[kind_of(made.source)].build.partition(":")[0])
    monkeypatch.setattr(module, "graph_device_of", lambda options, device: next(waiting))
    drafters, ref = [made.drafter(speculation) for _ in devices], made.ref
    engine = build_engine(ref.loaded, engine_config(speculation, max_num_seqs=3), drafters[0], InProcessChannel)

    def fail(batch):
        raise RuntimeError("the drafter's device is gone")

    run = Run(engine, ref.prompts[:5], greedy_params(32))
    try:
        while len(run.tokens[0]) < 8:
            run.step()
        monkeypatch.setattr(drafters[0], "draft", fail)
        while engine.drafter_state == "attached":
            run.step()
        assert engine.has_unfinished_requests()
        connect(engine, drafters[1], InProcessChannel)
        texts = run.finish()
    finally:
        engine.model.remove_taps()
    assert texts == [tokens[:32] for tokens in ref.continuations[:5]]
    assert engine.drafter_state == "attached"
    assert engine.speculation.num_drafts > 50
    for drafter, device in zip(drafters, devices, strict=True):
        assert drafter.graph_stats.replays[Stage.DRAFT_PROPOSAL]
        assert not drafter.graph_stats.eager_runs
        assert device.num_poisoned
