"""`wingbeat inspect`: one JSON object for programs, tables for people, one line for mistakes."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tests.native import compiler
from tests.needs import needs
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.local import engine
from wingbeat.deployments.local.engine import LocalConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.choice import KINDS
from wingbeat.runtime.engine_checks.self_test import SelfTest
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.metrics import SpeculationMetrics

HEAD, VERIFIER = str(demo_pair().drafter), str(demo_pair().verifier)
FIELDS = {
    *("path", "kind", "format", "shapes", "parameters", "file_bytes", "memory", "convention", "from_verifier"),
    *("probe", "notes", "verifier", "drafter", "measured_convention", "self_test"),
    *(kind.name for kind in KINDS.values() if kind.modules is not None),
}


class Reading(NamedTuple):
    """A reading of a head that was measured."""

    convention: HeadConvention
    length: float
    by_depth: tuple[float, ...]


class Choice:
    """Stands in for measured readings of a head."""

    readings = (
        Reading(HeadConvention((2, 12, 21)), 1.2, (0.1, 0.5)),
        Reading(HeadConvention((1, 11, 20)), 1.9, (0.5, 0.8)),
    )
    best = readings[1]

    def as_dict(self):
        return {"readings": [one._asdict() | {"convention": one.convention._asdict()} for one in self.readings]}


class Opened:
    """A stand-in for an engine that records its settings and reports a failed self-test."""

    def __init__(self) -> None:
        self.asked: list[tuple[LocalConfig, int]] = []
        self.convention_choice = Choice()
        self.self_test = SelfTest(32, 640, 1.5, SpeculationMetrics(100, 700, 30, [20, 10]))

    def __call__(self, config: LocalConfig, max_num_seqs: int) -> "Opened":
        self.asked.append((config, max_num_seqs))
        return self


@pytest.fixture
def inspect(capsys, monkeypatch):
    """Run the command; returns exit code, stdout and stderr."""

    def run(*args: str, opened=engine.open_engine):
        monkeypatch.setattr(engine, "open_engine", opened)
        with pytest.raises(SystemExit) as ended:
            cli.main(["inspect", *args])
        captured = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code, out=captured.out, err=captured.err)

    return run


def test_a_head_is_one_json_object(inspect):
    got = inspect(HEAD, "--json", "--dtype", "bfloat16")
    assert got.code == 0
    found = json.loads(got.out)
    assert set(found) == FIELDS
    assert (found["kind"], found["format"]) == ("eagle", "EAGLE-3 in SpecForge layout")
    assert found["convention"]["likeliest"]["tap_layers"] == [2, 12, 21]
    assert found["memory"]["dtype"] == "bfloat16"
    assert found["memory"]["weights_bytes"] == 2 * found["parameters"]
    assert found["memory"]["kv_bytes_per_token"] == 2 * 2 * 32
    assert found["self_test"] is found["measured_convention"] is found["verifier"] is None


@pytest.mark.slow
@needs("cpu")
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_weights_of_eight_bits_are_counted_as_they_lie(inspect):
    found = json.loads(inspect(VERIFIER, "--json", "--dtype", "int8").out)
    assert found["probe"]["can_be_verifier"]
    assert found["memory"]["dtype"] == "float32"
    assert found["parameters"] < found["memory"]["weights_bytes"] < 3 * found["parameters"]


@pytest.mark.slow
def test_with_the_verifier_the_self_test_is_part_of_it(inspect):
    found = json.loads(inspect(HEAD, "--model", VERIFIER, "--json").out)
    assert set(found) == FIELDS
    assert (found["verifier"], found["drafter"]) == (VERIFIER, "eagle")
    assert found["self_test"]["passed"]
    assert found["self_test"]["num_texts"] == 8
    assert found["self_test"]["first_position"] == found["self_test"]["acceptance_rate_per_pos"][0] > 0.5
    assert found["measured_convention"] is None, "the files leave nothing open"


def test_a_drafter_that_fails_is_shown_with_its_figures(inspect):
    opened = Opened()
    got = inspect(HEAD, "--model", VERIFIER, "--json", opened=opened)
    config, at_once = opened.asked[0]
    assert (got.code, at_once > 1) == (0, True)
    assert (config.model, config.drafter, config.allow_bad_drafter) == (Path(VERIFIER), HEAD, True)
    found = json.loads(got.out)
    assert not found["self_test"]["passed"]
    assert found["measured_convention"]["chosen"]["tap_layers"] == [1, 11, 20]
    assert [one["length"] for one in found["measured_convention"]["readings"]] == [1.2, 1.9]


def test_the_tables_say_the_same(inspect):
    out = inspect(HEAD, "--model", VERIFIER, opened=Opened()).out
    for word in ("EAGLE-3 in SpecForge layout", "draft_vocab_size", "3072", "896,640", "embed_tokens.weight", "256 B"):
        assert word in out
    for word in ("chosen", "[1, 11, 20]", "1.90", "0.200", "refused", "below 0.3"):
        assert word in out


@pytest.mark.slow
def test_a_verifier_is_probed(inspect):
    found = json.loads(inspect(VERIFIER, "--json").out)
    assert set(found) == FIELDS
    assert (found["kind"], found["format"], found.get("mtp")) == ("model", "LlamaForCausalLM", None)
    assert found["probe"]["can_be_verifier"]
    assert [(group["first"], group["last"]) for group in found["probe"]["layers"]] == [(0, 23)]
    out = inspect(VERIFIER).out
    assert "its attention agrees with transformers' own" in out
    assert "0-23" in out


def test_a_model_can_be_tried_as_a_draft_model(inspect, tiny_model: Path):
    opened = Opened()
    opened.convention_choice = None
    found = json.loads(inspect(str(tiny_model), "--model", VERIFIER, "--json", opened=opened).out)
    assert (found["kind"], found["drafter"]) == ("model", "draft_model")
    assert opened.asked[0][0].drafter == str(tiny_model)


def refused(folder: Path, name: str) -> str:
    copy = folder / name
    shutil.copytree(HEAD, copy)
    if name == "eagle4":
        config = json.loads((copy / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle4"]}
        (copy / "config.json").write_text(json.dumps(config))
    if name == "truncated":
        (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:200])
    return str(copy)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["/nowhere"], "/nowhere"),
        ([], "folder"),
        ([HEAD, "--model", "/nowhere"], "model is '/nowhere'"),
        ([HEAD, "--dtype", "int4"], "--dtype int4"),
        ([VERIFIER, "--model", VERIFIER], "prediction modules"),
        (["eagle4"], "EAGLE-4"),
        (["truncated"], "truncated"),
        ([HEAD, "--model", "tiny"], "layers in 0..1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_are_one_line_and_exit_code_2(inspect, tmp_path, tiny_model, args, hint):
    args = [refused(tmp_path, arg) if arg in ("eagle4", "truncated") else arg for arg in args]
    args = [str(tiny_model) if arg == "tiny" else arg for arg in args]
    got = inspect(*args)
    assert (got.code, got.out) == (2, "")
    assert got.err.count("\n") == 1
    assert hint in got.err
