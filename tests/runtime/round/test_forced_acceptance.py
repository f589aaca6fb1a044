"""Forced acceptance follows its profile, is marked wherever it shows, and is refused outside benchmarks."""

import itertools
import operator
import random

import pytest
import torch

from tests.runtime.models import CHAIN, NUM_TOKENS, TREE, Run, eagle_drafter, engine_config, greedy_params, reference
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.scripted import right_chain, right_tree, tree_tensors
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.kernels.tree.forced import Draws, drawn_lengths, forced_walk
from wingbeat.runtime.config import EngineConfig, ForcedAcceptance
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.round.forced_acceptance import AcceptanceForcer
from wingbeat.runtime.scheduling.request import GrammarSpec, Request

DEPTH = 7


@pytest.fixture
def benchmark_mode(monkeypatch):
    monkeypatch.setenv("WINGBEAT_BENCHMARK", "1")


def drawn(profile, epochs, positions):
    """Levels accepted at each epoch and position."""
    forcer = AcceptanceForcer(profile, DEPTH, epochs)
    return drawn_lengths(Draws(forcer.limits, epochs, torch.arange(len(epochs)), positions))


def mean_length(profile, max_depth):
    """Tokens per verified tree on average, where trees reach `max_depth`."""
    reached = itertools.accumulate((profile.rate(depth) for depth in range(1, max_depth + 1)), operator.mul)
    return 1 + sum(reached)


@pytest.mark.parametrize("value", [None, "0", "yes"])
def test_refused_without_the_variable(monkeypatch, value):
    monkeypatch.delenv("WINGBEAT_BENCHMARK", raising=False)
    if value is not None:
        monkeypatch.setenv("WINGBEAT_BENCHMARK", value)
    with pytest.raises(ValueError, match=r"forced_acceptance is 0\.79: .*set WINGBEAT_BENCHMARK=1"):
        EngineConfig(forced_acceptance=ForcedAcceptance.flat(0.79))


@pytest.mark.parametrize("rates", [(), (0.5, 1.2), (-0.1,)])
def test_rates_that_are_no_probabilities_are_refused(rates):
    with pytest.raises(ValueError, match=r"forced_acceptance\.rates is "):
        ForcedAcceptance(rates)


def test_a_length_below_the_bonus_token_is_refused():
    with pytest.raises(ValueError, match=r"length is 0\.5: use at least 1"):
        ForcedAcceptance.length(0.5)


@pytest.mark.parametrize(
    "profile",
    [ForcedAcceptance.flat(0.79), ForcedAcceptance.length(3.9), ForcedAcceptance((0.9, 0.5, 0.7, 0.1))],
    ids=["flat", "length", "by-depth"],
)
def test_drawn_lengths_follow_the_profile(profile):
    count = 40_000
    epochs = torch.arange(count) // 200 + 1
    lengths = 1 + drawn(profile, epochs, torch.arange(count) % 200).double()
    # The mean of n draws of standard deviation s lies within 5 s / sqrt(n) but for one in a million seeds.
    assert abs(lengths.mean().item() - mean_length(profile, DEPTH)) < 5 * lengths.std().item() / count**0.5 + 1e-6


def test_a_fixed_length_is_never_a_whole_token_off():
    lengths = drawn(ForcedAcceptance.length(3.9), torch.ones(500, dtype=torch.int64), torch.arange(500))
    assert set(lengths.tolist()) == {2, 3}
    assert set(drawn(ForcedAcceptance.length(4), torch.arange(99), torch.arange(99)).tolist()) == {3}


@pytest.mark.parametrize("length", [1, 2, 4, 6])
def test_the_walk_ends_where_it_is_told_to(length):
    """Also where the target agrees beyond it, and no further than first children go."""
    chance = random.Random(1)
    plans = [plan([5, 6, 7, 8], 90, chance) for plan in (right_chain, right_tree)] + [[], [(9, 0)]]
    tree = tree_tensors([1, 2, 3, 4], plans, 16)
    targets = torch.full((4, 16), 40)
    targets[0, :4] = torch.tensor([5, 6, 7, 8])
    forcer = AcceptanceForcer(ForcedAcceptance.length(length), DEPTH, torch.arange(4))
    draws = forcer.draws(torch.arange(4), torch.arange(4))
    walk = forced_walk(tree.token_ids, tree.parents, tree.num_valid, targets, draws, DEPTH + 1)
    assert walk.num_tokens.tolist() == [min(length, most) for most in (5, 2, 1, 2)]
    for row, count in enumerate(walk.num_tokens.tolist()):
        nodes = walk.nodes[row, :count].tolist()
        assert all(tree.parents[row, child] == node for node, child in itertools.pairwise(nodes))
        # The emitted tokens are those of the accepted nodes, then the target's own choice at the last node.
        assert walk.token_ids[row, : count - 1].tolist() == tree.token_ids[row, nodes[1:]].tolist()
        assert walk.token_ids[row, count - 1] == targets[row, nodes[-1]]


@pytest.mark.few(1)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_an_engine_accepts_by_the_profile_and_says_so(benchmark_mode, shape, graphs):
    ref = reference("llama")
    speculation = {"chain": CHAIN, "tree": TREE}[shape]
    profile = ForcedAcceptance.flat(0.6) if graphs else ForcedAcceptance.length(3.5)
    config = engine_config(speculation, forced_acceptance=profile)
    device = RecordingDevice() if graphs else None
    engine = build_engine(ref.loaded, config, eagle_drafter(ref.loaded, speculation), InProcessChannel, device)
    run = Run(engine, ref.prompts, greedy_params())
    tokens = run.finish()
    engine.model.remove_taps()
    assert [len(text) for text in tokens] == [NUM_TOKENS] * 8
    assert tokens != ref.continuations
    stats = engine.stats()
    # A tree of 16 nodes need not have a first child at every depth; a chain does.
    expected = mean_length(profile, speculation.max_path - 1)
    tolerance = 5 * 1.5 / stats.speculation.num_drafts**0.5
    assert stats.speculation.acceptance_length < expected + tolerance
    assert shape == "tree" or stats.speculation.acceptance_length > expected - tolerance
    assert stats.speculation.acceptance_length > 1.5
    assert stats.forced_acceptance == profile
    assert stats.speculation.as_dict()["forced_acceptance"] is True
    assert all(output.metrics.as_dict()["forced_acceptance"] is True for output in run.last.values())


def test_an_engine_that_draws_says_so_at_its_start_and_takes_no_grammar(benchmark_mode, caplog):
    ref = reference("llama")
    config = engine_config(CHAIN, forced_acceptance=ForcedAcceptance.length(2.5))
    engine = build_engine(ref.loaded, config, eagle_drafter(ref.loaded, CHAIN), InProcessChannel)
    [line] = {record.message for record in caplog.records if "forced" in record.message}
    assert (
        line == "forced_acceptance 1,0.5,0: accepted lengths are random draws, so the generated text is not the model's"
    )
    params = greedy_params(8, grammar=GrammarSpec("regex", "a+", "structured_outputs.regex"))
    with pytest.raises(
        ValueError, match=r"^structured_outputs.regex is set, but this engine runs with forced_acceptance"
    ):
        engine.add_request(Request("one", tuple(ref.prompts[0]), params))
    engine.model.remove_taps()


@pytest.mark.slow
def test_graphs_draw_what_eager_rounds_draw(benchmark_mode):
    ref = reference("llama")
    config = engine_config(TREE, forced_acceptance=ForcedAcceptance.flat(0.6))
    texts = []
    for device in (None, RecordingDevice()):
        engine = build_engine(ref.loaded, config, eagle_drafter(ref.loaded, TREE), InProcessChannel, device)
        texts.append(Run(engine, ref.prompts, greedy_params(48)).finish())
        engine.model.remove_taps()
    assert texts[0] == texts[1]


def test_nothing_is_marked_where_nothing_is_forced():
    ref = reference("llama")
    engine = build_engine(ref.loaded, engine_config(CHAIN), eagle_drafter(ref.loaded, CHAIN), InProcessChannel)
    run = Run(engine, ref.prompts[:1], greedy_params(8))
    run.finish()
    engine.model.remove_taps()
    assert engine.stats().forced_acceptance is None
    assert "forced_acceptance" not in run.last[0].metrics.as_dict()
