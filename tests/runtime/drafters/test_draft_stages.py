"""Every kind of drafter with weights drafts, captured, what it drafts eagerly: in any batch and depth, whoever comes.

A captured stage is replayed as the operations that were recorded, on the same memory, or by calling its function again.
"""

import logging
import weakref
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.draft_world import BLOCK_SIZE, MAX_LEN, MIXED, NUM_SLOTS, World, channel_spec, taps_size
from tests.runtime.drafter_kinds import KINDS as TEXT_KINDS
from tests.runtime.drafters.test_eagle_stages import a_round, assert_same
from tests.runtime.drafters.test_shared_kv import build as build_assistant
from tests.runtime.drafters.test_shared_kv import saved as saved_assistant
from tests.runtime.graphs.test_graph_runner import FakeDevice
from tests.runtime.models import (
    CHAIN,
    HIDDEN_SIZE,
    TREE,
    VOCAB_SIZE,
    Run,
    engine_config,
    greedy_params,
    random_head,
    random_model,
    reference,
)
from tests.runtime.mtp_world import NUM_LAYERS, Modules
from tests.runtime.one_pass_world import random_tensors, raw_config, save_head
from tests.runtime.parallel_eagle_world import parallel_config, parallel_tensors
from tests.runtime.poisoned_graphs import PoisoningDevice
from tests.runtime.recorded_graphs import RecordingDevice, RepeatingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.kernels.tree.results import Coupling
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters import draft_model, draft_stages, eagle, growth, mtp, one_pass, shared_kv
from wingbeat.runtime.drafters.draft_model import ModelDrafter
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.mtp import MtpDrafter
from wingbeat.runtime.drafters.one_pass import OnePassDrafter
from wingbeat.runtime.drafters.parallel_eagle import ParallelEagleDrafter
from wingbeat.runtime.drafters.shared_kv import SharedKvDrafter
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.mtp_loader import load_mtp_modules
from wingbeat.runtime.heads.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.heads.one_pass.parallel_eagle import load_parallel_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import build_engine, connect
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.few(1)

LENS = (2, 9, 17, 40, 1 + BLOCK_SIZE, 2 * BLOCK_SIZE, 33, MAX_LEN - 8)
SHAPES = {"chain": CHAIN, "tree": TREE}
GREEDY = (0.0,) * NUM_SLOTS
ONE_PASS = ("dflash", "dspark-rnn", "dflash2")
MASKED = {"dflash": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}}
ANY_TARGET = SimpleNamespace(hidden_size=HIDDEN_SIZE, num_layers=4, vocab_size=VOCAB_SIZE, embedding=None, lm_head=None)
SMALL = {"num_hidden_layers": 2}
WINDOWS = SMALL | {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """(shape, graph device) -> drafter, by kind; weights are loaded once."""

    @cache
    def modules(family: str, count: int):
        folder = tmp_path_factory.mktemp(f"{family}-{count}")
        Modules.random(family, count).save(folder)
        return load_mtp_modules(TargetDescription.from_checkpoint(folder))

    @cache
    def model(name: str):
        return prepare_model(random_model(name, **(WINDOWS if name == "gemma3" else SMALL)), name)

    @cache
    def assistant():
        eager = build_assistant(saved_assistant(tmp_path_factory.mktemp("gemma4")), CHAIN)
        return eager.head, dict(zip(eager.types, eager.needs.kv_layers, strict=True)), eager.pool.layers

    @cache
    def deep_head():
        one_layer = random_head(reference("llama").loaded)
        torch.manual_seed(3)
        head = EagleHead(replace(one_layer.config, num_layers=2))
        head.load_state_dict(one_layer.state_dict(), strict=False)
        return head.eval().requires_grad_(False)

    @cache
    def one_pass(family: str):
        folder = tmp_path_factory.mktemp(family)
        if family == "p-eagle":
            raw = parallel_config((0, 2), num_layers=2)
            checkpoint = read_one_pass_checkpoint(save_head(folder, raw, parallel_tensors(raw)))
            return load_parallel_head(checkpoint, ANY_TARGET, torch.float32, "cpu")
        raw = raw_config(family, (0, 2), num_layers=2, block_size=9, **MASKED.get(family, {}))
        checkpoint = read_one_pass_checkpoint(save_head(folder, raw, random_tensors(raw)))
        return load_one_pass_head(checkpoint, ANY_TARGET, torch.float32, "cpu")

    def mtp(family, count, speculation, device):
        return MtpDrafter(modules(family, count), speculation, NUM_LAYERS, device)

    return {
        "eagle": lambda speculation, device: EagleDrafter(random_head(reference("llama").loaded), speculation, device),
        "draft-model": lambda speculation, device: ModelDrafter(model("llama"), speculation, VOCAB_SIZE, device),
        "draft-model-windows": lambda speculation, device: ModelDrafter(model("gemma3"), speculation, None, device),
        "mtp-1": partial(mtp, "glm4_moe", 1),
        "mtp-3": partial(mtp, "deepseek_v3", 3),
        "deep-eagle": lambda speculation, device: EagleDrafter(deep_head(), speculation, device),
        "assistant": lambda speculation, device: SharedKvDrafter(*assistant(), speculation, 6, device),
        "p-eagle": lambda speculation, device: ParallelEagleDrafter(one_pass("p-eagle"), speculation, device),
        **{
            family: lambda speculation, device, family=family: OnePassDrafter(one_pass(family), speculation, device)
            for family in ONE_PASS
        },
    }


KINDS = ("eagle", "draft-model", "draft-model-windows", "mtp-1", "mtp-3", "assistant", "p-eagle", *ONE_PASS)
by_kind = pytest.mark.parametrize("kind", KINDS)
by_shape = pytest.mark.parametrize("speculation", SHAPES.values(), ids=SHAPES.keys())


@pytest.fixture(autouse=True)
def couplings_of_a_device(monkeypatch):
    """On the host a growth looks whether anybody samples, which no device is asked."""

    def couplings(roots):
        return [Coupling(roots.temperatures, roots.seeds, positions) for positions in roots.positions]

    for module in (growth, one_pass):
        monkeypatch.setattr(module, "couplings_of", couplings)


def attached(kinds, kind, speculation, device=None):
    drafter = kinds[kind](speculation, device)
    spec = channel_spec(speculation, taps_size(drafter))
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    return drafter


def new_world(drafter, temperatures=MIXED):
    return World(drafter.speculation, taps_size(drafter), LENS, temperatures)


def few_batches(monkeypatch):
    """Recording and replaying on the host is slow: batches of 1, 2 and all."""

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
    assert stats.replays == {Stage.DRAFT_PROPOSAL: num_trees, Stage.DRAFT_ACCEPT: 1}


@pytest.mark.slow
@by_shape
@pytest.mark.parametrize("kind", [*KINDS, "deep-eagle"])
@torch.inference_mode()
def test_the_shortest_sequences_are_drafted_for_alike(kinds, kind, speculation, monkeypatch):
    """Of two to six tokens, before anything is behind them and after, in memory that is full of others' rows."""
    monkeypatch.setattr(draft_stages, "draft_batches", lambda *sizes: (5,))
    speculation = replace(speculation, draft_steps=5)
    drafters = [attached(kinds, kind, speculation), attached(kinds, kind, speculation, FakeDevice())]
    worlds = [World(speculation, taps_size(drafter), (2, 3, 4, 5, 6), MIXED) for drafter in drafters]
    for drafter, world in zip(drafters, worlds, strict=True):
        for part in (*(part for pair in drafter.pool.caches for part in pair), *drafter.pool.extras):
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
    """A first tree follows the last chunk of a prompt, beside one that decodes and one that only decodes; then the slot
    of that one has another sequence."""
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
    """Three of nine rows: what is stored for anybody's committed tokens stays as it is."""
    few_batches(monkeypatch)
    drafter = attached(kinds, kind, speculation, FakeDevice())
    world = new_world(drafter)
    world.feed(drafter)
    slots = world.slots[2:5]
    # Of L settled tokens module k has L - 1 - k rows, whose results the next one reads.
    behind = range(drafter.num_modules) if isinstance(drafter, MtpDrafter) else [0] * len(drafter.pool.caches)
    stored = [(part, lag) for pair, lag in zip(drafter.pool.caches, behind, strict=True) for part in pair]
    stored += list(zip(drafter.pool.extras, behind, strict=False))
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
        # The graph of most sequences at some depth; of kinds that draft in one pass, which have one depth, that of two.
        whole = kind in ("p-eagle", *ONE_PASS)
        drafter = attached(kinds, kind, CHAIN, FakeDevice(failing=lambda capture: capture == (5 if whole else 4)))
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
    """A tree of one level has no rows of drafted tokens."""
    shape = SpeculationConfig(1, 3, 3)
    for kind in KINDS:
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
    """More requests than slots; the drafter is lost in the middle, and another one is captured and told everything."""
    few_batches(monkeypatch)
    devices = [PoisoningDevice(RepeatingDevice()) for _ in range(2)]
    waiting = iter(devices)
    for module in (eagle, draft_model, mtp, one_pass, shared_kv):
        monkeypatch.setattr(module, "graph_device_of", lambda options, device: next(waiting))
    made = TEXT_KINDS[kind](tmp_path)
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
