"""Rounds replayed as graphs write what eager rounds write, whatever the batch, the trees and the load."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from tests.optional import FEATURES, is_deleted
from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy_params,
    random_model,
    random_prompts,
    reference,
)
from tests.runtime.recorded_graphs import RecordingDevice, RepeatingDevice
from tests.runtime.scripted import ScriptedDrafter, malform, random_tree, right_chain, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.buckets import MOST_GRAPHS, draft_batches
from wingbeat.runtime.graphs.graph_runner import Bucket, Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.round import shapes
from wingbeat.runtime.round.choice import Choosing
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model

pytestmark = pytest.mark.few(1)

SHAPES = {"chain": CHAIN, "tree": TREE}
SHORT = 48


def first(ref, count=SHORT):
    return [tokens[:count] for tokens in ref.continuations]


@pytest.fixture
def captured():
    """Builds engines whose rounds are captured; their hooks are removed afterwards."""
    made = []

    def make(ref, config, drafter, device=None):
        made.append(build_engine(ref.loaded, config, drafter, InProcessChannel, device or RecordingDevice()))
        return made[-1]

    yield make
    for engine in made:
        engine.model.remove_taps()


def drafter_of(kind, ref, shape):
    plans = {"right": right_chain if shape == "chain" else right_tree, "malformed": random_tree}
    if kind in plans:
        corrupt = malform if kind == "malformed" else None
        return ScriptedDrafter(ref.sequences, plans[kind], ref.loaded.vocab_size, corrupt)
    return eagle_drafter(ref.loaded, SHAPES[shape])


def replays(engine):
    stats = engine.stats().graphs
    return stats.replays.get(Stage.BASE_DECODING, 0), stats.replays.get(Stage.BASE_VERIFICATION, 0)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_plain_rounds(captured, batch):
    ref = reference("llama")
    engine = captured(ref, engine_config(max_num_seqs=batch), None)
    assert Run(engine, ref.prompts[:2], greedy_params(SHORT)).finish() == first(ref)[:2]
    assert replays(engine)[0] > SHORT - 4
    assert replays(engine)[1] == 0
    assert (Stage.BASE_DECODING, Bucket(batch, 1)) in engine.stats().graphs.captured


@pytest.mark.parametrize(("model", "kind"), [("llama", "right"), ("llama", "malformed"), ("gemma3", "right")])
def test_trees(captured, model, kind):
    ref = reference(model)
    engine = captured(ref, engine_config(max_num_seqs=2), drafter_of(kind, ref, "tree"))
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == first(ref)
    stats = engine.stats()
    assert replays(engine)[1] > 3
    assert not stats.graphs.eager_runs or is_deleted(FEATURES["prompt_graphs"])
    assert (stats.speculation.num_accepted_tokens > 0) == (kind != "malformed")
    # Only sampling looks at values on the CPU, and each way of it is tried once for bare roots and once for trees.
    assert [failure.stage for failure in stats.graphs.failed] == [Stage.BASE_CHOICE] * 4
    assert stats.graphs.captured


def test_chains(captured):
    ref = reference("llama")
    engine = captured(ref, engine_config(CHAIN, max_num_seqs=2), drafter_of("eagle", ref, "chain"))
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == first(ref)
    assert replays(engine)[1] > 3


def test_batches_that_shrink_run_in_smaller_buckets(captured):
    ref = reference("llama")
    engine = captured(ref, engine_config(), drafter_of("right", ref, "tree"), RepeatingDevice())
    lengths = [5, 10, 15, 20, 25, 30, 40, 64]
    run = Run(engine, ref.prompts, [greedy_params(length) for length in lengths])
    assert run.finish() == [tokens[:length] for tokens, length in zip(ref.continuations, lengths, strict=True)]
    sizes = {bucket.num_reqs for stage, bucket in engine.stats().graphs.captured if stage != Stage.BASE_PROMPTS}
    assert sizes == {1, 2, 4, 8}


@pytest.mark.slow
def test_sampled_requests_write_what_they_write_alone(captured):
    ref = reference("llama")
    params = [SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=n, ignore_eos=True) for n in range(4)]
    alone = captured(ref, engine_config(overlap=False), None, RepeatingDevice())
    expected = Run(alone, ref.prompts[:4], params).finish()
    alone.model.remove_taps()
    engine = captured(ref, engine_config(), drafter_of("eagle", ref, "tree"), RepeatingDevice())
    mixed = Run(engine, ref.prompts[:5], [*params, greedy_params(40)]).finish()
    assert mixed == [*expected, ref.continuations[4][:40]]
    assert engine.stats().graphs.failed == []


@pytest.mark.slow
def test_the_statistics_can_be_sent(captured):
    ref = reference("llama")
    engine = captured(ref, engine_config(max_num_seqs=2), drafter_of("right", ref, "tree"))
    Run(engine, ref.prompts[:1], greedy_params(20)).finish()
    sent = json.loads(json.dumps(asdict(engine.stats())))["graphs"]
    assert sent["replays"] == {str(stage): count for stage, count in engine.stats().graphs.replays.items()}
    assert ["base_verification", [2, 16, 0]] in sent["captured"]
    assert sent["failed"][0][2].startswith("RuntimeError: nonzero")


@pytest.mark.slow
def test_rounds_of_more_rows_than_any_graph_run_eagerly(captured, monkeypatch):
    monkeypatch.setattr(shapes, "MOST_ROWS", 40)
    ref = reference("llama")
    engine = captured(ref, engine_config(), drafter_of("right", ref, "tree"))
    assert Run(engine, ref.prompts, greedy_params(40)).finish() == first(ref, 40)
    stats = engine.stats().graphs
    assert stats.eager_runs[Stage.BASE_VERIFICATION] > 0
    decodes = [bucket for stage, bucket in stats.captured if stage != Stage.BASE_PROMPTS]
    assert max(bucket.num_reqs * bucket.size for bucket in decodes) <= 40


def test_a_forward_pass_is_captured_once_and_each_way_to_choose_behind_it(captured):
    ref = reference("llama")
    engine = captured(ref, engine_config(max_num_seqs=2), None, RepeatingDevice())
    stages = [stage for stage, bucket in engine.stats().graphs.captured if bucket == Bucket(2, 1)]
    assert stages == [Stage.BASE_DECODING, *[Stage.BASE_CHOICE] * len(Choosing)]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("num_nodes", [2, 16, 60, 130])
def test_verifier_and_drafter_have_no_more_graphs_than_allowed(num_nodes, adaptive):
    shape = SpeculationConfig(draft_steps=7, draft_top_k=8, verify_tree_size=num_nodes, adaptive=adaptive)
    for max_num_seqs in (1, 16, 100, 256, 1024):
        config = EngineConfig(max_num_seqs=max_num_seqs, speculation=shape)
        most = MOST_GRAPHS + shapes.OF_ANOTHER_WIDTH * (adaptive and max_num_seqs > 16 and num_nodes <= 16)
        decodes, prompts = shapes.round_shapes(config)
        beside = () if prompts is None else prompts.prompts
        assert shapes.num_graphs(config) <= most + len(beside), max_num_seqs
        assert len(beside) <= 6
        assert shape.max_path * len(draft_batches(max_num_seqs, shape.max_path, shape.draft_top_k)) <= MOST_GRAPHS
        for width, (forwards, choices) in decodes.items():
            assert forwards[0] == choices[0] == 1
            assert forwards[-1] == choices[-1] == min(max_num_seqs, forwards[-1])
            assert forwards[-1] * width <= shapes.MOST_ROWS
            mixed = () if prompts is None else prompts.mixed[width]
            assert max(mixed, default=0) <= forwards[-1], "what a mixed pass leaves has room"


@pytest.mark.slow
def test_small_batches_of_a_choice_wider_than_its_forward_pass_write_the_same(captured, monkeypatch):
    """Rows that no forward pass of the round filled hold an earlier one's, and decide nothing."""
    monkeypatch.setattr(shapes, "_choices", lambda batches: batches[-1:])
    ref = reference("llama")
    engine = captured(ref, engine_config(), drafter_of("right", ref, "tree"))
    lengths = [5, 10, 15, 20, 25, 30, 40, 48]
    run = Run(engine, ref.prompts, [greedy_params(length) for length in lengths])
    assert run.finish() == [tokens[:length] for tokens, length in zip(ref.continuations, lengths, strict=True)]
    choices = {bucket.num_reqs for stage, bucket in engine.stats().graphs.captured if stage == Stage.BASE_CHOICE}
    assert choices == {8}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_slots_change_hands(captured, overlap):
    """Preemption, waiting requests and slots that get another sequence leave nothing behind in a graph."""
    ref = reference("llama")
    config = engine_config(max_num_seqs=3, max_model_len=128, num_kv_blocks=12, overlap=overlap)
    engine = captured(ref, config, drafter_of("eagle", ref, "tree"))
    assert Run(engine, ref.prompts, greedy_params(SHORT)).finish() == first(ref)
    assert engine.stats().num_preemptions > 0


def test_graphs_where_nothing_can_be_captured_are_refused():
    ref = reference("llama")
    with pytest.raises(ValueError, match="cuda_graphs is True: the verifier is on cpu"):
        Engine(ref.loaded, engine_config(cuda_graphs=True))
    engine = Engine(ref.loaded, engine_config(cuda_graphs=False), graph_device=RecordingDevice())
    assert engine.stats().graphs is None


def test_modes_of_graphs_have_names():
    assert not EngineConfig(cuda_graphs="none").may_capture
    assert not EngineConfig(cuda_graphs=False).may_capture
    assert all(EngineConfig(cuda_graphs=mode).may_capture for mode in (None, True, "full", "decode_only"))
    with pytest.raises(ValueError, match="cuda_graphs is 'piecewise': use one of full, decode_only, none"):
        EngineConfig(cuda_graphs="piecewise")
    ref = reference("llama")
    with pytest.raises(ValueError, match="cuda_graphs is decode_only: the verifier is on cpu"):
        Engine(ref.loaded, engine_config(cuda_graphs="decode_only"))
    assert Engine(ref.loaded, engine_config(cuda_graphs="none"), graph_device=RecordingDevice()).stats().graphs is None


@pytest.mark.gpu
@pytest.mark.parametrize("speculation", [CHAIN, TREE, replace(TREE, adaptive=True)], ids=["chain", "tree", "adaptive"])
def test_on_a_gpu_graphs_write_what_eager_rounds_write(speculation):
    ref = reference("llama")
    loaded = prepare_model(random_model("llama").to("cuda"), "llama")
    prompts = random_prompts((5, 40, 17))
    params = [greedy_params(48), greedy_params(48), SamplingParams(max_tokens=48, seed=3, ignore_eos=True)]
    tokens = []
    for graphs in (False, True):
        drafter = ScriptedDrafter(ref.sequences, right_tree, ref.loaded.vocab_size)
        if speculation.draft_top_k == 1:
            drafter = ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size)
        config = engine_config(speculation, cuda_graphs=graphs)
        engine = build_engine(loaded, config, drafter, InProcessChannel)
        tokens.append(Run(engine, ref.prompts[:2] + prompts[2:], params).finish())
        engine.model.remove_taps()
    assert tokens[0] == tokens[1]
    stats = engine.stats().graphs
    assert stats.failed == []
    assert stats.replays[Stage.BASE_VERIFICATION] > 0
    torch.cuda.synchronize()
