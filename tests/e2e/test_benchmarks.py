"""The benchmark scripts run from start to end and report figures that fit together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEMO = BENCHMARKS.parent / "examples" / "demo_pair"
DEMO_HEADS = tuple(name for name in ("dspark", "dflash2") if (DEMO / name).is_dir())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (DEMO / "drafter" / "config.json").is_file(), reason="the demo pair comes with a source checkout"
    ),
]


def quick_run(script: str, output: Path, *options: str) -> dict:
    """The figures of a smoke run."""
    command = [sys.executable, BENCHMARKS / script, "--quick", "--output", output, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert output.with_suffix(".md").is_file()
    report = json.loads(output.read_text(encoding="utf-8"))
    assert {"cpu", "versions", "model", "workload"} <= report["facts"].keys()
    return report["figures"]


def test_acceptance_reports_every_head_and_shape_and_the_same_tokens(tmp_path):
    figures = quick_run("acceptance.py", tmp_path / "acceptance.json", "--other", "n-gram=ngram")
    assert set(figures["temperatures"]) == {"0", "1"}
    for of_it in figures["temperatures"].values():
        assert of_it["num_prompts_with_same_tokens"] == figures["num_prompts"]
        assert set(of_it["heads"]) == {"eagle3", *DEMO_HEADS, "n-gram"}
        for name, shapes in of_it["heads"].items():
            assert set(shapes) == {"chain of 5", "chain of 7", "default tree"}
            for shape in shapes.values():
                assert shape["acceptance_length"] == pytest.approx(
                    1 + shape["num_accepted_tokens"] / max(1, shape["num_drafts"]), abs=1e-4
                )
            chain = shapes["chain of 5"]
            assert (chain["draft_steps"], chain["draft_top_k"]) == (5, 1)
            if name != "n-gram":
                assert chain["num_draft_tokens"] == 5 * chain["num_drafts"]


@needs("adaptive")
def test_load_sweep_compares_three_modes_and_draws_them(tmp_path):
    picture = tmp_path / "sweep.png"
    figures = quick_run("load_sweep.py", tmp_path / "sweep.json", "--plot", str(picture))
    measured = {(one["concurrency"], one["mode"]) for one in figures["series"]}
    assert measured == {(load, mode) for load in (1, 3) for mode in ("plain", "speculative", "adaptive")}
    for one in figures["series"]:
        assert (one["speculative_decoding"]["num_drafts"] == 0) == (one["mode"] == "plain") or one["mode"] == "adaptive"
        assert min(one["tokens_per_s"]) > 0
    assert sum(figures["decisions"].values()) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.ray
@pytest.mark.soak
def test_serving_reports_every_mode_at_every_load_and_where_rounds_go(tmp_path):
    figures = quick_run("serving.py", tmp_path / "serving.json", "--proxy", "--plain-app", "--overhead")
    modes = {(series["mode"], series["concurrency"]) for series in figures["series"]}
    names = {"plain", "speculative", "plain, by Serve's proxy", "speculative, by Serve's proxy", "plain, no drafter"}
    assert modes == {(mode, load) for mode in names for load in (1, 2)}
    for series in figures["series"]:
        speculated = series["speculative_decoding"]["num_drafts"] > 0
        assert speculated == series["mode"].startswith("speculative")
        assert series["round"]["num_rounds"] > 0
    assert len(figures["overhead"]) == 2
    assert all(len(way["local"]) == len(way["remote"]) > 0 for way in figures["overhead"])


@pytest.mark.ray
@pytest.mark.soak
def test_every_contestant_takes_its_turns(tmp_path):
    figures = quick_run("peer_transformers.py", tmp_path / "peer.json")
    for kind in ("in_process", "http"):
        names = {one["name"] for one in figures[kind]}
        assert {"Wingbeat, plain", "Wingbeat, speculative"} < names
        assert all(one["tokens_per_s"] > 0 for one in figures[kind])


@pytest.mark.ray
def test_no_kill_costs_a_request_or_a_text(tmp_path):
    runs = quick_run("chaos.py", tmp_path / "chaos.json", "--streams", "8")
    crowd, run = runs["crowd"], runs["kills"]
    assert crowd["failures"] == crowd["differences"] == crowd["errors"] == []
    assert sorted(kill["kind"] for kill in crowd["kills"]) == ["drafter hangs", "drafter killed"]
    assert 0 < crowd["longest_silence_s"] < 2
    assert run["failures"] == run["differences"] == run["errors"] == []
    kinds = [kill["kind"] for kill in run["kills"]]
    assert sorted(kinds) == ["drafter hangs"] + 3 * ["drafter killed"] + ["engine killed", "replica killed"]
    assert all(kill["attached_s"] > 0 for kill in run["kills"])
    assert run["num_requests"] > 0
    assert run["met"]["decoding"] > 0


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_runs_the_rounds_of_one_in_process(tmp_path):
    blocks = quick_run("engine_process.py", tmp_path / "process.json", "--ways", "process", "own")["blocks"]
    assert {(block["way"], block["concurrency"]) for block in blocks} == {
        ("process", 1),
        ("process", 2),
        ("own", 1),
        ("own", 2),
    }
    assert all(block["num_tokens"] == 16 * block["concurrency"] for block in blocks)
    assert all(block["num_rounds"] > 0 and block["thread_shares"] for block in blocks)


def test_drafters_are_compared_on_new_sampled_and_repeated_requests(tmp_path):
    figures = quick_run("drafters.py", tmp_path / "drafters.json")
    assert set(figures) == {"held-out text", "held-out text, sampled", "the same requests again"}
    for runs in figures.values():
        assert set(runs) == {"none", "eagle3", *DEMO_HEADS, "draft_model", "ngram", "suffix"}
        assert runs["none"]["speculative_decoding"]["num_drafts"] == 0
        for name in ("eagle3", *DEMO_HEADS, "draft_model"):
            assert runs[name]["speculative_decoding"]["num_accepted_tokens"] > 0
            assert min(runs[name]["accepted_per_draft_ms"]) > 0


def test_real_sizes_report_passes_by_rows_and_forced_rounds(tmp_path):
    figures = quick_run("real_size.py", tmp_path / "real_size.json")["models"]
    assert [one["dtype"] for one in figures] == ["float32", "bfloat16", "int8"]
    for one in figures:
        assert list(map(int, one["seconds"])) == [1, 2, 4, 8, 16, 32, 64]
        assert min(one["seconds"].values()) > 0
        for found in one["tokens_per_s"].values():
            assert min(found["plain"] + found["speculating"]) > 0
            assert 1 < found["tokens per round"][0] <= 6


def test_prompts_are_measured_by_chunks(tmp_path):
    runs = quick_run("prompts.py", tmp_path / "prompts.json")["runs"]
    assert {(run["dtype"], run["chunk"], run["batch"]) for run in runs} == {
        (dtype, chunk, batch) for dtype in ("float32", "bfloat16") for chunk in (64, 512) for batch in (1, 4)
    }
    assert all(min(run["seconds"]) > 0 for run in runs)


def test_learning_is_measured_in_process(tmp_path):
    figures = quick_run("learning.py", tmp_path / "learning.json", "--domain", "html")
    assert len(figures["marks"]) == 3
    assert figures["marks"][-1]["minutes"] > figures["marks"][0]["minutes"]


@pytest.mark.ray
def test_the_demo_holds_little_before_its_first_request(tmp_path):
    output = tmp_path / "memory.json"
    command = [sys.executable, BENCHMARKS / "memory.py", "--quick", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    demo = json.loads(output.read_text(encoding="utf-8"))["figures"]["demo"]
    assert {"engine", "drafter: its process", "router", "the command"} <= demo.keys()
    assert not [name for name in demo if "dashboard" in name or name == "other"]
    mib = {name: part["pss_bytes"] / 2**20 for name, part in demo.items()}
    assert mib["engine"] <= 512
    assert mib["the command"] <= 200, "the command keeps torch"
