"""A head's right convention is measured and kept on disk; the files decide where measurements hardly differ."""

import logging

import pytest
import torch

from tests.runtime.fitted_pair import NUM_LAYERS, TAPS, as_specforge, fitted_pair
from tests.runtime.models import CHAIN, DEMO_PAIR, TREE, engine_config, greedy_params, random_prompts
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.conventions.readings import (
    ConventionChoice,
    Reading,
    choose_convention,
    describe,
    measure_readings,
)
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.conventions import STATED, default_taps
from wingbeat.runtime.heads.load import head_conventions
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.heads.unroll import matches
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import load_model

FLOAT32_CPU = (torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return fitted_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def verifier(pair):
    return TargetDescription.from_checkpoint(pair[0]), load_model(pair[0], *FLOAT32_CPU)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Put the cache of measurements into a folder of this test."""
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def outputs_of(layers):
    """Layers as ids of outputs: each tap is counted by the layer that it leaves."""
    return tuple(layer - 1 for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ids", [outputs_of(TAPS), TAPS, None], ids=["ids name outputs", "ids name inputs", "ids are missing"]
)
def test_the_taps_that_the_head_was_made_for_are_found(pair, verifier, cache, tmp_path, ids):
    head = as_specforge(pair[1], tmp_path / "head", ids)
    candidates = head_conventions(head, verifier[0])
    assert len(candidates) > 1
    choice = choose_convention(head, *verifier, None)
    assert [reading.convention for reading in choice.readings] == list(candidates)
    assert choice.best.convention.tap_layers == TAPS
    assert choice.best.by_depth[0] > 0.6
    others = [reading.by_depth[0] for reading in choice.readings if reading.convention.tap_layers != TAPS]
    assert max(others) < 0.3


@pytest.mark.slow
def test_the_engine_drafts_with_the_reading_that_was_found(pair, cache, tmp_path):
    head = as_specforge(pair[1], tmp_path / "head", TAPS)
    assert outputs_of(default_taps(NUM_LAYERS)) != TAPS
    llm = LLM(pair[0], head, engine_config(TREE), InProcessChannel, device="cpu")
    assert llm.engine.model.tap_layers == TAPS
    assert llm.self_test.passed
    plain = LLM(pair[0], "none", engine_config(TREE), InProcessChannel, device="cpu")
    prompts, params = random_prompts((5, 17)), [greedy_params(24)] * 2
    assert [r.token_ids for r in llm.generate(prompts, params)] == [
        r.token_ids for r in plain.generate(prompts, params)
    ]


@pytest.mark.slow
def test_a_mislabelled_norm_output_is_found_by_the_later_drafts(cache, tmp_path, caplog):
    head = as_specforge(DEMO_PAIR / "drafter", tmp_path / "head", (1, 11, 20), norm_output=True)
    target = TargetDescription.from_checkpoint(DEMO_PAIR / "verifier")
    loaded, tokenizer = load_model(target.path, *FLOAT32_CPU), Tokenizer.load(target.path)
    with caplog.at_level(logging.INFO):
        choice = choose_convention(head, target, loaded, tokenizer)
    as_labelled, right = choice.readings
    assert as_labelled.convention == HeadConvention((2, 12, 21), norm_output=True)
    assert choice.best is right
    assert right.convention == HeadConvention((2, 12, 21), norm_output=False)
    assert right.by_depth[0] == as_labelled.by_depth[0], "the first draft is made before anything is fed back"
    assert right.by_depth[1] > as_labelled.by_depth[1]
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("readings")]
    assert len(lines) == 1
    assert f"measured at {right.length:.2f}" in lines[0]
    assert f"{as_labelled.length:.2f}" in lines[0]


def test_what_was_found_is_kept_and_needs_no_verifier_again(pair, verifier, cache, tmp_path):
    head = as_specforge(pair[1], tmp_path / "head", TAPS)
    choice = choose_convention(head, *verifier, None)
    assert choose_convention(head, verifier[0], None, None) == choice
    (kept,) = cache.glob("convention-*.json")
    before = kept.read_text()
    kept.write_text(before[:-20])
    assert choose_convention(head, *verifier, None) == choice
    assert kept.read_text() == before


@pytest.mark.slow
def test_other_weights_are_measured_anew(pair, verifier, cache, tmp_path):
    head = as_specforge(pair[1], tmp_path / "head", TAPS)
    choose_convention(head, *verifier, None)
    weights = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").unlink()
    (head / "model.safetensors").write_bytes(weights[:-4] + bytes(4))
    choose_convention(head, *verifier, None)
    assert len(list(cache.glob("convention-*.json"))) == 2


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_only_a_warning(pair, verifier, cache, tmp_path, caplog):
    cache.write_text("in the way")
    choice = choose_convention(as_specforge(pair[1], tmp_path / "head", TAPS), *verifier, None)
    assert choice.best.convention.tap_layers == TAPS
    assert "cannot keep" in caplog.text


def test_nothing_is_measured_where_nothing_is_open(pair, verifier):
    target, _ = verifier
    assert STATED in (pair[1] / "config.json").read_text()
    assert choose_convention(pair[1], target, None, None) is None
    assert choose_convention("none", target, None, None) is None


@pytest.mark.slow
def test_the_measured_figure_is_what_the_engine_accepts(pair, verifier):
    """Text and head are the same; the engine drafts from some positions of the text, the measurement from all."""
    target, loaded = verifier
    llm = LLM(*pair, engine_config(CHAIN), InProcessChannel, device="cpu")
    drafter = load_drafter(pair[1], target, CHAIN)
    (reading,) = measure_readings(drafter.head, matches, [HeadConvention(TAPS)], loaded, None).readings
    assert reading.by_depth[0] == pytest.approx(llm.self_test.first_position, abs=0.1)


def reading(taps, gain, error):
    return Reading(HeadConvention(taps), 2.0 + gain, (0.5,), gain, error)


@pytest.mark.parametrize(
    ("gains", "best"),
    [
        ([(0.0, 0.0), (0.05, 0.06)], 0),
        ([(0.0, 0.0), (0.2, 0.06)], 1),
        ([(0.0, 0.0), (0.2, 0.06), (0.3, 0.06)], 2),
        ([(0.0, 0.0), (0.2, 0.06), (0.3, 0.2)], 1),
        ([(0.0, 0.0), (-0.5, 0.06)], 0),
    ],
)
def test_the_files_are_believed_unless_another_reading_is_clearly_better(gains, best):
    choice = ConventionChoice(tuple(reading((index,), *one) for index, one in enumerate(gains)))
    assert choice.readings.index(choice.best) == best
    assert ConventionChoice.from_dict(choice.as_dict()) == choice
    assert all(f"tap_layers=[{index}]" in describe(choice) for index in range(len(gains)))
