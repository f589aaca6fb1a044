"""The self-test separates heads that suit a verifier from those that do not, and leaves the engine unchanged."""

import logging
from dataclasses import asdict

import pytest
import torch

from tests.needs import needs
from tests.runtime.fitted_pair import TAPS, fitted_pair, rewrite_config
from tests.runtime.models import CHAIN, TREE, engine_config, greedy_params, random_head, random_prompts
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.choice import TEXT_DRAFTERS
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.engine_checks.self_test import (
    LEAST_ACCEPTANCE,
    BadDrafterError,
    SelfTest,
    check_drafter,
    run_self_test,
)
from wingbeat.runtime.heads.conventions import STATED
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import LLM, build_engine
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.verifier.loading.loader import load_model

pytestmark = pytest.mark.few(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return fitted_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def off_by_one(pair, tmp_path_factory):
    """Copy of the head whose config counts the tapped layers one lower."""
    convention = {"tap_layers": [layer - 1 for layer in TAPS], "norm_output": False, "norm_before_residual": False}
    return rewrite_config(pair[1], tmp_path_factory.mktemp("heads") / "off-by-one", **{STATED: convention})


def open_llm(pair, head=None, speculation=CHAIN, channel_factory=InProcessChannel, **fields):
    limits = {
        name: fields.pop(name) for name in ("max_num_seqs", "max_model_len", "drafter_timeout_s") if name in fields
    }
    config = engine_config(speculation, **limits)
    return LLM(pair[0], head or pair[1], config, channel_factory, device="cpu", **fields)


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_a_head_that_suits_passes(pair, speculation, max_num_seqs):
    llm = open_llm(pair, speculation=speculation, max_num_seqs=max_num_seqs)
    assert llm.self_test.passed
    assert llm.self_test.first_position > 0.6
    assert llm.self_test.num_texts == 8, "the first turn is clear"


@pytest.mark.parametrize(
    ("num_drafts", "accepted", "is_clear"),
    [(0, 0, False), (64, 28, False), (64, 40, True), (400, 170, True), (170, 10, True)],
)
def test_a_share_is_clear_four_standard_errors_from_the_least(num_drafts, accepted, is_clear):
    metrics = SpeculationMetrics(num_drafts, num_drafts, accepted, [accepted])
    assert SelfTest(8, 100, 1.0, metrics).is_clear == is_clear


def test_an_unclear_share_takes_all_texts(pair, monkeypatch):
    monkeypatch.setattr(SelfTest, "is_clear", False)
    assert open_llm(pair).self_test.num_texts == 32


@pytest.mark.slow
def test_taps_off_by_one_are_refused_with_the_figure_and_the_way_round(pair, off_by_one):
    with pytest.raises(
        BadDrafterError, match=r"off-by-one .*verifier.* is 0\.\d\d .*0\.3 .*--allow-bad-drafter"
    ) as caught:
        open_llm(pair, off_by_one)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_random_head_is_served_where_that_is_asked_for(pair, tmp_path, caplog):
    save_eagle_head(random_head(load_model(pair[0], torch.float32, torch.device("cpu"))), tmp_path / "random")
    with pytest.raises(BadDrafterError, match="random"):
        open_llm(pair, tmp_path / "random")
    with caplog.at_level(logging.WARNING):
        bad = open_llm(pair, tmp_path / "random", allow_bad_drafter=True)
    assert f"is {bad.self_test.first_position:.2f}" in caplog.text
    assert not bad.self_test.passed
    prompts, params = random_prompts((5, 17)), [greedy_params(24)] * 2
    tokens = [result.token_ids for result in bad.generate(prompts, params)]
    assert tokens == [result.token_ids for result in open_llm(pair, "none").generate(prompts, params)]


def test_kinds_without_weights_are_not_tested(pair):
    for name in TEXT_DRAFTERS:
        assert open_llm(pair, name).self_test is None
    assert open_llm(pair, "none").self_test is None


@pytest.mark.slow
def test_the_engine_is_as_new_afterwards(pair):
    llm, prompt = open_llm(pair), random_prompts((40,))
    engine, fresh = llm.engine, open_llm(pair, "none").engine
    assert asdict(engine.stats()) == asdict(fresh.stats()) | {"drafter_state": "attached", "num_drafters_attached": 1}
    assert (engine.block_manager.query_tokens, engine.block_manager.hit_tokens) == (0, 0)
    engine.check_integrity()
    first = llm.generate(prompt, [greedy_params(24)])[0]
    run_self_test(engine, None)
    again = llm.generate(prompt, [greedy_params(24)])[0]
    assert first.num_cached_tokens == again.num_cached_tokens == 0
    assert (first.token_ids, first.metrics) == (again.token_ids, again.metrics)
    assert llm.generate(prompt, [greedy_params(24)])[0].num_cached_tokens > 0, "the prefix cache still works"


@needs("adaptive")
@pytest.mark.slow
def test_drafts_are_of_the_full_shape_whatever_pays(pair):
    speculation = SpeculationConfig(draft_steps=5, draft_top_k=1, adaptive=True)
    llm = open_llm(pair, speculation=speculation)
    adaptive = llm.engine.policy.current
    test = run_self_test(llm.engine, None)
    assert llm.engine.policy.current is adaptive
    assert test.metrics.num_draft_tokens == 5 * test.metrics.num_drafts
    assert adaptive.stats().decisions == {}


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["chain", "tree"])
def test_captured_rounds_with_the_host_a_round_behind_are_as_new_too(pair, speculation):
    """Rounds as on a GPU: pruned on the device, replayed as graphs, results read a round late."""
    shape = SpeculationConfig(draft_top_k=1 if speculation == "chain" else 4, adaptive=True)
    loaded = load_model(pair[0], torch.float32, torch.device("cpu"))
    drafter = load_drafter(pair[1], TargetDescription.from_checkpoint(pair[0]), shape)
    engine = build_engine(loaded, engine_config(shape, overlap=True), drafter, InProcessChannel, RecordingDevice())
    test = check_drafter(engine, None, "head")
    assert test.first_position > 0.6
    assert test.metrics.num_draft_tokens == (shape.num_nodes - 1) * test.metrics.num_drafts
    graphs = engine.stats().graphs
    assert graphs.captured
    assert not graphs.replays
    engine.check_integrity()


@pytest.mark.slow
def test_the_shortest_contexts_can_be_tested(pair):
    assert open_llm(pair, max_model_len=8).self_test.num_tokens == 8 * 6


@pytest.mark.slow
def test_a_drafter_that_is_lost_meanwhile_is_no_pass(pair):
    channels = []

    def new_channel(spec):
        channels.append(InProcessChannel(spec))
        return channels[-1]

    llm = open_llm(pair, channel_factory=new_channel, drafter_timeout_s=0.05)
    channels[0].pump = None  # from now on no drafter answers
    with pytest.raises(BadDrafterError, match="lost"):
        check_drafter(llm.engine, None, "head", allow_bad=True)


def test_a_busy_engine_is_not_disturbed(pair):
    llm = open_llm(pair)
    stream = llm.stream(random_prompts((5,)), [greedy_params(24)])
    next(stream)
    with pytest.raises(RuntimeError, match="idle"):
        run_self_test(llm.engine, None)
    stream.close()


@pytest.mark.slow
def test_contexts_beyond_the_trained_positions_are_warned_of(pair, tmp_path, caplog):
    short = rewrite_config(pair[1], tmp_path / "short", max_position_embeddings=128)
    with caplog.at_level(logging.WARNING):
        open_llm(pair, short, max_model_len=128)
        assert "positions" not in caplog.text
        open_llm(pair, short, max_model_len=256)
    assert "max_model_len is 256" in caplog.text
    assert "128 positions" in caplog.text


@pytest.mark.slow
def test_the_limit_lies_between_heads_that_suit_and_those_that_do_not(pair, off_by_one):
    good = open_llm(pair).self_test.first_position
    bad = open_llm(pair, off_by_one, allow_bad_drafter=True).self_test.first_position
    assert bad < LEAST_ACCEPTANCE < good
