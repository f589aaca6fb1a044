"""The first session of the GPU benchmarks: what it needs installed, its dry run at toy sizes, and what it says of made
results."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.runtime.fake_gpu import fake_gpu, why_not
from tests.runtime.gpu_world import verifier
from tests.runtime.host_counts import KINDS, steady_engine

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
ABSENT = ("ray", "pydantic", "typer", "fastapi", "starlette", "llguidance", "rich")
"""Packages that a GPU image with torch, triton, transformers and pytest lacks."""
DRY_RUN = f"""
import ast, contextlib, io, pathlib, runpy, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT!r} else self.finder.find_spec(name, path, target)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
sys.path.insert(0, {str(FOLDER)!r})
import _suite

ran = dict.fromkeys(("doctor", "round_stages", "losslessness"), "")
for part in _suite.sessions()["first"]:
    if part.name in ran:
        out, sys.argv = io.StringIO(), [f"{{part.name}}.py", "--quick"]
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            runpy.run_path(part.command[1], run_name="__main__")
        part.result, part.status = _suite.last_object(out.getvalue()), "ok"
        ran[part.name] = part
        if part.result["details"]["failed"]:
            part.status = "failed"
    elif not part.is_tests:
        __import__(part.name)
for parts in _suite.sessions().values():
    for part in parts:
        name = pathlib.Path(part.command[1]).stem
        if not part.is_tests and not name.startswith("served"):
            __import__(name)
# What the doctor asks of a GPU is imported where it is asked.
import wingbeat.deployments.doctor.driver
import wingbeat.deployments.doctor.gpu as asked
for node in ast.walk(ast.parse(open(asked.__file__).read())):
    if isinstance(node, ast.ImportFrom):
        __import__(node.module)
print(_suite.markdown({{}}, list(ran.values()), quick=True))
"""


@pytest.fixture
def words(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_verdict")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_dry_run_without_ray_and_pydantic_ends_in_a_verdict():
    """In one process: the scripts that answer the session's questions at toy sizes, the others by their imports."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", DRY_RUN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdict = done.stdout.partition("## Verdict")[2]
    print(verdict)
    assert "Toy sizes" in verdict
    assert "**Does it work? Yes.** Every check passed." in verdict
    assert "**Is text lossless? Yes**" in verdict
    assert "- batch 1: " in verdict
    assert "- batch 2, tree: " in verdict
    for kind in ("plain", "chain", "tree"):
        cells = next(line for line in verdict.splitlines() if line.startswith(f"| batch 2, {kind} |")).split("|")
        assert len(cells) == 12
        assert ("-" in {cell.strip() for cell in cells}) == (kind == "plain"), "a plain round drafts nothing"


def part(name: str, status: str = "ok", output: str = "", **result: Any) -> SimpleNamespace:
    is_tests = name.startswith("tests_")
    return SimpleNamespace(name=name, status=status, most_s=90.0, is_tests=is_tests, output=output, result=result)


def findings(**other: tuple[str, str]) -> SimpleNamespace:
    """The doctor's part; `other` by the words of the part's name joined by _, as (verdict, detail)."""
    said = {name: ("ok", "fine") for name in ("driver", "GPU", "GPU_kernels", "CUDA_IPC", "CUDA_graphs")} | other
    found = [
        {"part": name.replace("_", " "), "verdict": verdict, "detail": detail, "seconds": 1.0}
        for name, (verdict, detail) in said.items()
    ]
    failed = any(verdict == "failed" for verdict, _ in said.values())
    return part("doctor", "failed" if failed else "ok", details={"findings": found})


def lossless(speculation: float = 1.0, graphs: float = 1.0, half: float = 0.875) -> SimpleNamespace:
    values = {
        "float32: equal sequences, speculation on and off": speculation,
        "float32: equal outputs, graphs on and off": graphs,
        "bfloat16: equal sequences, speculation on and off": half,
        "bfloat16: equal outputs, graphs on and off": graphs,
        "bfloat16: largest logit gap at a first difference": 0.03,
    }
    return part("losslessness", figures=[{"name": name, "value": value} for name, value in values.items()])


def row(batch: int, kind: str, over_plain: float | None = None, wait_ms: float = 2.0, **stages: float) -> dict:
    stages = {"verify": 6.0, "accept": 0.2, "rest": 0.1} | stages
    measured = {
        "batch": batch,
        "kind": kind,
        "tokens_per_s": 100.0 * batch,
        "round_ms": sum(stages.values()),
        "stages_ms": stages,
        "floors_ms": dict.fromkeys(stages, 0.0) | {"verify": 5.0},
        "host_ms": {"schedule": 0.5, "wait": wait_ms},
    }
    if over_plain is not None:
        measured |= {"over_plain": over_plain, "acceptance_length": 3.9, "graphs_failed": []}
    return measured


def rounds(*ratios: float, **fields: Any) -> SimpleNamespace:
    rows = [
        made
        for batch, ratio in zip((1, 16, 64), ratios, strict=False)
        for made in (row(batch, "plain"), row(batch, "chain", ratio, draft=2.0))
    ]
    return part("round_stages", details={"rows": rows, "skipped": {}} | fields)


def hop(status: str = "ok") -> SimpleNamespace:
    if status != "ok":
        return part("hop", status, details={"failed": {"cuda_ipc": "ChannelError: shares no events"}}, figures=[])
    return part("hop", figures=[{"name": "round trip by cuda_ipc, to the device", "value": 41.7}])


def good() -> list[SimpleNamespace]:
    passed = [
        part(name, output="=== 9 passed in 1.0s ===") for name in ("tests_kernels", "tests_graphs", "tests_channel")
    ]
    return [findings(), rounds(2.8, 2.1, 1.4), lossless(), *passed, hop()]


def replaced(*parts: SimpleNamespace) -> list[SimpleNamespace]:
    by_name = {each.name: each for each in parts}
    return [by_name.get(each.name, each) for each in good()]


def test_all_good(words):
    text = "\n".join(words.verdict(good()))
    assert "**Does it work? Yes.** Every check passed." in text
    assert "**Is text lossless? Yes**: in float32 neither" in text
    assert "in bfloat16 88% of sequences are equal, and where others part, two logits are 0.03 apart" in text
    assert "- batch 64: faster (chain 1.40 x at 3.9 tokens a round)." in text
    assert "- batch 1, plain: verify, 6.00 ms where its floor is 5.00." in text
    assert "- batch 1, chain: draft, 2.00 ms where its floor is 0.00." in text
    assert "42 us more a round" in text
    assert (
        "| batch 1, chain | 100 | 8.30 / 5.00 | 2.00 / 0.00 | 6.00 / 5.00 | 0.20 / 0.00 | 0.10 | 0.50 | 2.00 |" in text
    )
    assert "| batch 1, plain | 100 | 6.30 / 5.00 | - | 6.00 / 5.00 |" in text


def test_a_wrong_kernel_names_its_switch(words):
    found = findings(GPU_kernels=("warning", "torch runs in the place of kernel walk_tree: 3% differ"))
    tests = part("tests_kernels", "failed", "E assert\n=== 2 failed, 1 error, 7 passed in 3.0s ===")
    text = "\n".join(words.verdict(replaced(found, tests)))
    assert "Yes, with the switches below" in text
    [line] = [line for line in text.splitlines() if line.startswith("- GPU kernels: ")]
    assert "kernel walk_tree" in line
    assert "3 tests of tests_kernels failed" in line
    assert "`--kernels torch`" in line


def test_graphs_that_fail_name_their_switch(words):
    measured = rounds(2.0)
    measured.result["details"]["rows"][-1]["graphs_failed"] = ["base_verification 1x8: RuntimeError: spoiled"]
    text = "\n".join(words.verdict(replaced(findings(CUDA_graphs=("failed", "RuntimeError: capture")), measured)))
    [line] = [line for line in text.splitlines() if line.startswith("- CUDA graphs: ")]
    assert "RuntimeError: capture; 1 were not captured and run eagerly, such as base_verification 1x8" in line
    assert "`--no-cuda-graphs`" in line
    assert "Yes, with the switches below" in text


def test_missing_ipc_names_its_switch_once(words):
    found = findings(CUDA_IPC=("warning", "cuda:0 to cuda:0: shares no events; --channel auto uses host memory there"))
    text = "\n".join(words.verdict(replaced(found, hop("failed"))))
    [line] = [line for line in text.splitlines() if "--channel shm" in line]
    assert "hop failed at cuda_ipc: ChannelError: shares no events" in line
    assert "us more a round" not in text


def test_a_driver_that_is_too_old_is_no_ones_switch(words):
    text = "\n".join(words.verdict([findings(driver=("failed", "530: torch needs 580")), rounds(2.0)]))
    assert "**Does it work? No, or not all of it.**" in text
    assert "- driver: 530: torch needs 580. No switch avoids it." in text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"speculation": 0.5},
            "- speculation: 50% of float32's sequences are equal with it and without. Serve with the drafter",
        ),
        (
            {"graphs": 0.75},
            "75% of bfloat16's outputs are equal with them and without. Serve with `--no-cuda-graphs`.",
        ),
    ],
)
def test_other_text_is_not_lossless(words, wrong, said):
    text = "\n".join(words.verdict(replaced(lossless(**wrong))))
    assert "**Is text lossless? No**: it is another one with" in text
    assert "**Does it work? Yes, with the switches below.**" in text
    assert said in text


def test_speculation_that_is_slower_than_plain_is_told_with_what_adapts(words):
    text = "\n".join(words.verdict(replaced(rounds(2.0, 1.01, 0.7))))
    assert "- batch 16: as fast (" in text
    [line] = [line for line in text.splitlines() if line.startswith("- batch 64: slower (chain 0.70 x")]
    assert "adaptive speculation, the default, is to decode plainly" in line


def test_a_part_that_ran_out_of_time_leaves_its_question_open(words):
    cut = part(
        "round_stages", "timed out", details={"rows": [row(1, "plain")], "skipped": {"batch 64, tree": "no room"}}
    )
    late = part("losslessness", "no time")
    text = "\n".join(words.verdict(replaced(cut, late)))
    assert "**Does it work? As far as was asked.**" in text
    assert "- round_stages was cut off after 90 s" in text
    assert "- losslessness found no time" in text
    assert "**Is text lossless? Not known**: losslessness no time." in text
    assert "**Is speculation faster than plain? Not known**: round_stages timed out." in text
    assert "- batch 64, tree: no room." in text
    assert "- batch 1, plain: verify" in text, "what was measured is told"


def test_a_device_that_waits_for_its_host_is_told(words):
    measured = part("round_stages", details={"rows": [row(1, "plain", wait_ms=0.0, rest=9.0)], "skipped": {}})
    text = "\n".join(words.verdict([measured]))
    assert "- batch 1, plain: rest, 9.00 ms where its floor is 0.00 (small copies, and what the device waits)" in text
    assert "the device waits for the host, which works 0.50 ms of a round" in text


def test_what_was_not_asked_has_no_answer(words):
    assert words.verdict([part("draft_round"), part("bandwidth")]) == []
    assert not any("faster" in line for line in words.verdict([lossless()]))


def test_a_script_that_only_measures_more_fails_without_a_word_on_whether_it_works(words):
    profile = part("kernel_profile", "failed", details={"failed": {"plain": "RuntimeError: no CUPTI"}})
    text = "\n".join(words.verdict([*good(), profile]))
    assert "**Does it work? As far as was asked.**" in text
    assert "- kernel_profile failed at plain: RuntimeError: no CUPTI: what it measures is not known." in text


@pytest.mark.slow
def test_a_part_of_the_doctor_that_fails_or_hangs_fails_its_script_and_not_the_others(monkeypatch, capsys, hang):
    monkeypatch.syspath_prepend(str(FOLDER))
    doctor, harness = (importlib.import_module(name) for name in ("doctor", "_harness"))
    from wingbeat.deployments.doctor.examination import Part, Verdict

    monkeypatch.setattr(doctor, "machine_parts", lambda: [Part("stuck", 0.1, hang)])
    monkeypatch.setattr(doctor, "gpu_parts", lambda seen: [Part("CUDA graphs", 5, lambda: (Verdict.OK, "replayed"))])
    result = doctor.measure(harness.Bench("doctor", torch.device("cpu"), quick=True))
    assert list(result.details["failed"]) == ["stuck"]
    assert [figure.name for figure in result.figures] == ["stuck: failed", "CUDA graphs: ok"]
    assert len(capsys.readouterr().out.splitlines()) == 2, "each part is reported when it is known"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_of_a_round_lies_between_two_events(monkeypatch, tmp_path, kind):
    """On a GPU of shapes, where a millisecond passes between any two events."""
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path))
    stage_times, harness = (importlib.import_module(name) for name in ("_stage_times", "_harness"))
    with fake_gpu() as gpu:
        engine = steady_engine(gpu, verifier(), kind, 3)
        times = stage_times.StageTimes(harness.Bench("test", torch.device("cuda"), quick=True), engine)
        with times():
            for _ in range(4):
                engine.step()
        engine.step()
    drafts = float(kind != "plain")
    assert times.stages_ms == {"draft": drafts, "verify": 1.0, "accept": 1.0, "publish": 1.0 - drafts}, (
        "who drafts does so within it"
    )
    assert all(ms >= 0 for ms in times.host_ms.values())


def test_the_documents_have_the_sums_of_a_hop_as_they_are_computed(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    importlib.import_module("_computed_hop").main()
    text = (FOLDER.parents[1] / "benchmarks" / "results" / "gpu_hop_computed.md").read_text()
    assert capsys.readouterr().out.strip() in text


def test_floors_are_what_must_be_read_or_computed(monkeypatch):
    """A plain step of the 8B shape reads 15.0 GB of weights; sixteen rows a sequence compute sixteen times as much."""
    monkeypatch.syspath_prepend(str(FOLDER))
    floors, model, harness = (importlib.import_module(name) for name in ("_floors", "_model", "_harness"))
    config = model.llama_config(harness.Bench("test", torch.device("meta"), quick=False))
    plain, tree = (floors.verification(config, 2, 1, nodes, 1024) for nodes in (1, 16))
    assert plain.num_bytes == tree.num_bytes == pytest.approx(15.14e9, rel=1e-3)
    assert tree.flops == 16 * plain.flops
    slow_to_read, slow_to_compute = floors.Rates(1e12, 1e18), floors.Rates(1e18, 1e12)
    assert plain.floor_ms(slow_to_read) == pytest.approx(15.14, rel=1e-3)
    assert plain.floor_ms(slow_to_compute) == pytest.approx(1e3 * plain.flops / 1e12)
    assert floors.acceptance(config, 2, 64, 16).num_bytes == 2 * 64 * 16 * config.vocab_size
