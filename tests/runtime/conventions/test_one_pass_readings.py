"""The right convention of a one-pass head is found: its taps and what its slots predict."""

import json
import shutil

import pytest
import torch

from tests.runtime.models import DEMO_PAIR
from tests.runtime.one_pass.one_pass_world import random_tensors, raw_config, save_head
from tests.runtime.one_pass.parallel_eagle_world import parallel_config, parallel_tensors
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.conventions.readings import choose_convention, measure_readings
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.conventions import STATED
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.blocks import block_matches
from wingbeat.runtime.one_pass.readings import one_pass_readings
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import load_model

TAPS = (2, 12, 21)
CHAIN = SpeculationConfig(4, 1)


@pytest.fixture(scope="module")
def demo():
    target = TargetDescription.from_checkpoint(DEMO_PAIR / "verifier")
    return target, load_model(target.path, torch.float32, torch.device("cpu")), Tokenizer.load(target.path)


def mislabelled(folder, ids):
    """The demo's head, whose config counts its taps in another way and states no convention."""
    shutil.copytree(DEMO_PAIR / "dflash2", folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["dflash_config"]["target_layer_ids"] = list(ids)
    del raw[STATED]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.slow
def test_both_ways_to_count_taps_are_measured_and_either_can_be_drafted_by(demo, tmp_path, monkeypatch):
    """A layer more or less changes little in this verifier, so the test does not say which convention wins."""
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path / "cache"))
    head = mislabelled(tmp_path / "head", TAPS)
    choice = choose_convention(head, *demo)
    assert [reading.convention.tap_layers for reading in choice.readings] == [(3, 13, 22), TAPS]
    assert choose_convention(head, *demo) == choice
    drafter = load_drafter(head, demo[0], CHAIN)
    drafter.read_as(choice.readings[1].convention)
    assert drafter.needs.tap_layers == drafter.head.tap_layers == TAPS


@pytest.mark.slow
def test_taps_of_other_layers_are_told_from_the_heads_own(demo):
    head = load_drafter(DEMO_PAIR / "dflash2", demo[0], CHAIN).head
    wrong, right = (HeadConvention(taps, slots="fill-in") for taps in ((0, 1, 2), TAPS))
    choice = measure_readings(head, block_matches, (wrong, right), *demo[1:])
    assert choice.best.convention == right
    assert choice.readings[0].by_depth[0] < choice.best.by_depth[0] - 0.1


@pytest.mark.slow
def test_what_slots_predict_is_found(demo):
    head = load_drafter(DEMO_PAIR / "dflash2", demo[0], CHAIN).head
    wrong, right = (HeadConvention(TAPS, slots=slots) for slots in ("shift", "fill-in"))
    choice = measure_readings(head, block_matches, (wrong, right), *demo[1:])
    assert choice.best.convention == right
    assert choice.readings[0].by_depth[0] < 0.3 < choice.best.by_depth[0]


def test_a_head_that_was_written_here_leaves_nothing_open(demo):
    assert one_pass_readings(DEMO_PAIR / "dflash2", demo[0], 4) == (HeadConvention(TAPS, slots="fill-in"),)


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("dflash", {}, ["fill-in", "shift"]),
        ("dflash", {"sample_from_anchor": False}, ["fill-in"]),
        ("dspark-vanilla", {}, ["shift", "fill-in"]),
        ("dspark-vanilla", {"sample_from_anchor": False}, ["fill-in"]),
        ("jetspec", {}, ["fill-in"]),
        ("dflash2", {}, ["fill-in"]),
        ("dflash", {"block_size": 4}, ["fill-in"]),
    ],
)
def test_what_the_config_leaves_open_is_tried(family, fields, expected, tmp_path):
    raw = raw_config(family, (0, 2, 4), num_layers=1) | fields
    head, target = save_head(tmp_path, raw, random_tensors(raw)), TargetDescription(tmp_path, 64, 8, 97)
    readings = one_pass_readings(head, target, 4)
    both = (1, 3, 5), (0, 2, 4)
    layers = both if len(readings) > 1 else both[:1]
    assert list(readings) == [HeadConvention(taps, slots=slots) for taps in layers for slots in expected]


def test_a_p_eagle_head_has_the_readings_of_eagle3(tmp_path):
    raw = parallel_config((1, 2, 3), num_layers=2)
    head = save_head(tmp_path, raw, parallel_tensors(raw))
    readings = one_pass_readings(head, TargetDescription(tmp_path, 64, 8, 97), 4)
    assert readings[0].tap_layers == (1, 2, 3)
    assert all(reading.slots is None for reading in readings)
