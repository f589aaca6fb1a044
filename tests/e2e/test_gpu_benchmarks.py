"""The GPU benchmarks without a GPU: they say so, run at toy sizes, and merge into a report that hides no failure."""

import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.recorded_graphs import RepeatingDevice
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.kv.pool import LayerAttention

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.name.startswith("_"))
FIGURE_FIELDS = {"name", "value", "unit", "at_most", "at_least"}

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def run_script(monkeypatch, capsys, tmp_path):
    """Runs a script as a program in this process: (exit status, standard output, standard error)."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name: str, *options: str) -> tuple[int, str, str]:
        path = str(FOLDER / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *options])
        monkeypatch.setenv("OUT", str(tmp_path))
        status = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("gpu_suite", FOLDER / "_suite.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_promised_script_is_there():
    assert {
        "attention", "bandwidth", "draft_level", "draft_round", "engine_speed", "hop",
        "kernel_profile", "losslessness", "moe", "peers_spec", "plain_decode", "prompt_rounds", "real_acceptance",
        "round_stages", "served", "served_8b", "two_processes", "verify",
    } <= set(SCRIPTS)  # fmt: skip


@without_gpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_a_script_ends_with_one_line(run_script, name):
    status, out, err = run_script(name)
    assert status == 2
    assert (out + err).count("\n") == 1
    assert (out + err).startswith(name)
    assert "no CUDA GPU" in out + err


@pytest.mark.slow
@without_gpu
def test_without_a_gpu_the_one_command_ends_with_one_line_and_writes_nothing(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "report")}
    done = subprocess.run([FOLDER / "run.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("\n") == 1
    assert not (tmp_path / "report").exists()


SLOW = {"attention", "drafter_kinds", "two_processes", "engine_speed", "kernel_profile", "round_stages"}
SLOW |= {"moe", "peers_spec", "real_acceptance"}
SERVED = {name: [pytest.mark.slow, pytest.mark.ray] for name in ("served", "served_8b")}
MARKS = {name: [pytest.mark.slow] for name in SLOW} | SERVED


@pytest.mark.few(1)
@without_gpu
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SCRIPTS if name != "hop"])
def test_toy_sizes_give_figures(run_script, name):
    status, out, err = run_script(name, "--quick")
    assert status == 0, err
    report = json.loads(out.splitlines()[-1])
    assert (report["name"], report["quick"]) == (name, True)
    assert report["figures"]
    for figure in report["figures"]:
        assert figure.keys() == FIGURE_FIELDS
        assert figure["value"] >= 0
        assert figure["at_most"] is None or figure["at_least"] is None
    if name == "losslessness":
        exact = [figure for figure in report["figures"] if figure["name"].startswith("float32")]
        assert len(exact) == 3
        assert all(figure["value"] >= figure["at_least"] for figure in exact)


@pytest.mark.slow
@without_gpu
def test_prompts_are_timed_captured_and_not(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    prompt_rounds, harness = (importlib.import_module(name) for name in ("prompt_rounds", "_harness"))
    result = prompt_rounds.measure(harness.Bench("test", torch.device("cpu"), quick=True), RepeatingDevice())
    names = ["eager", "captured", "eager, padded alike"]
    assert [figure.name for figure in result.figures] == [
        f"prompt of {length} tokens, {way}" for length in (5, 100) for way in names
    ]
    assert result.details == {"failed": {}, "graph_replays": {Stage.BASE_PROMPTS: 6}, "graphs_failed": []}


@pytest.mark.slow
def test_a_failing_part_is_recorded_and_the_rest_still_runs(suite, tmp_path):
    scripts = {
        "breaks": "raise SystemExit('it broke')",
        "mute": "print('no figures')",
        "sleeps": "import time; print('{\"figures\": []}', flush=True); time.sleep(60)",
        "works": "print('a note'); print('{\"name\": \"works\", \"facts\": {\"model\": \"toy\"}, \"figures\": ["
        "{\"name\": \"step\", \"value\": 1.5, \"unit\": \"x\", \"at_most\": 1.2, \"at_least\": null},"
        "{\"name\": \"share\", \"value\": 0.8, \"unit\": \"x\", \"at_most\": null, \"at_least\": 0.75}]}')",
    }  # fmt: skip
    for name, code in {**scripts, "_helper": "raise SystemExit('not a part')"}.items():
        (tmp_path / f"{name}.py").write_text(code)
    parts = suite.script_parts(tmp_path, quick=False)
    next(part for part in parts if part.name == "sleeps").most_s = 3
    assert suite.run_suite(parts, tmp_path / "report", budget_s=100) == 1
    report = json.loads((tmp_path / "report" / "gpu.json").read_text())
    assert {part["name"]: part["status"] for part in report["parts"]} == {
        "breaks": "failed",
        "mute": "failed",
        "sleeps": "timed out",
        "works": "ok",
    }
    by_name = {part["name"]: part for part in report["parts"]}
    assert "it broke" in by_name["breaks"]["output"]
    assert by_name["sleeps"]["result"] == {"figures": []}
    assert {"gpu", "torch", "transformers", "triton", "commit"} <= report["machine"].keys()
    text = (tmp_path / "report" / "gpu.md").read_text()
    assert "| step | 1.5 | x | at most 1.2: missed |" in text
    assert "| share | 0.8 | x | at least 0.75: met |" in text


def test_a_spent_budget_starts_nothing_and_fails_the_suite(suite, tmp_path):
    (tmp_path / "late.py").write_text("raise SystemExit('ran')")
    parts = suite.script_parts(tmp_path, quick=False)
    assert suite.run_suite(parts, tmp_path / "report", budget_s=0) == 1
    [part] = json.loads((tmp_path / "report" / "gpu.json").read_text())["parts"]
    assert (part["status"], part["output"]) == ("no time", "")


def test_all_parts_running_is_success(suite, tmp_path):
    (tmp_path / "fine.py").write_text("print('{\"figures\": []}')")
    assert suite.run_suite(suite.script_parts(tmp_path, quick=True), tmp_path / "report", budget_s=100, quick=True) == 0
    assert "measure nothing" in (tmp_path / "report" / "gpu.md").read_text()


@pytest.mark.slow
def test_a_failing_case_costs_itself_alone_and_its_script_is_failed(suite, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
from _harness import Cases, Figure, run

def measure(bench):
    cases = Cases(bench, {{"model": "toy"}})
    for name, value in (("one", 1), ("two", 0), ("three", 4)):
        cases.run(name, lambda: [Figure(name, 1 / value, "s")])
    return cases.result

run("Cases.", measure)
"""
    (tmp_path / "cases.py").write_text(code)
    assert suite.run_suite(suite.script_parts(tmp_path, quick=True), tmp_path / "report", budget_s=100) == 1
    [part] = json.loads((tmp_path / "report" / "gpu.json").read_text())["parts"]
    assert part["status"] == "failed"
    assert [figure["name"] for figure in part["result"]["figures"]] == ["one", "three"]
    assert part["result"]["details"]["failed"] == {"two": "ZeroDivisionError: division by zero"}


@pytest.mark.slow
def test_whole_logs_of_tests_that_fail_or_hang_lie_beside_the_report(suite, tmp_path, monkeypatch):
    pytest.importorskip("pytest_timeout")
    monkeypatch.setattr(suite, "TEST_TIMEOUT_S", 2)
    (tmp_path / "test_bad.py").write_text(
        "import time\ndef test_a():\n    assert 'first reason' == 1\ndef test_b():\n    assert 'second reason' == 1\n"
        "def test_c():\n    time.sleep(60)\n"
    )
    part = suite.pytest_part("bad", [str(tmp_path / "test_bad.py")], 60, workers=1)
    assert suite.run_suite([part], tmp_path / "report", budget_s=100) == 1
    log = (tmp_path / "report" / "bad.log").read_text()
    assert part.status == "failed"
    assert all(reason in log for reason in ("first reason", "second reason", "Timeout"))


@pytest.mark.parametrize("name", ["first", "speed", "peers", "served", "next", "next2", "kinds"])
def test_a_session_names_what_there_is_and_fits_its_budget(suite, name):
    parts = suite.sessions()[name]
    assert [part.name for part in parts if not part.is_tests and part.name not in SCRIPTS] == []
    assert sum(part.most_s for part in parts) <= 1.35 * suite.BUDGET_S, "the last part would seldom run"
    for part in parts:
        paths = [FOLDER.parents[1] / word for word in part.command if word.startswith("tests/")]
        assert not part.is_tests or paths
        assert all(path.exists() for path in paths)


def test_norms_of_the_measured_model_are_not_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    model, harness = (importlib.import_module(name) for name in ("_model", "_harness"))
    bench = harness.Bench("test", torch.device("cpu"), quick=True)
    loaded = model.random_model(bench, model.llama_config(bench))
    norms = [weight for name, weight in loaded.model.named_parameters() if "norm" in name]
    assert norms
    assert all(weight.std() > 0.05 for weight in norms)


def test_a_case_that_a_gpu_has_no_memory_for_is_skipped_and_the_others_are_not(monkeypatch):
    """The 8B shape's weights on a GPU of 78 GiB: 256 sequences of more than a thousand tokens do not fit."""
    monkeypatch.syspath_prepend(str(FOLDER))
    engine, speed, harness = (importlib.import_module(name) for name in ("_engine", "engine_speed", "_harness"))
    bench = harness.Bench("test", torch.device("cuda"), quick=False)
    loaded = SimpleNamespace(layers=[LayerAttention(32, 8, 128, 128, None)] * 32)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (62 << 30, 78 << 30))
    reasons = {case.label: engine.too_large(bench, loaded, case) for case in speed.cases(bench)}
    skipped = [label for label, reason in reasons.items() if reason is not None]
    assert skipped
    assert all(label.startswith("batch 256") for label in skipped)
