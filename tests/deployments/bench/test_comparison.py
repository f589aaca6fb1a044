"""`wingbeat bench` with several drafters or loads: each in a process of its own, with a table of speed-ups."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deployments.local.test_generate import FakeLLM, wingbeat  # noqa: F401
from wingbeat.deployments.bench import comparison
from wingbeat.deployments.bench.passes import Pass, report_of
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.cli.options import UserError
from wingbeat.runtime.metrics import SpeculationMetrics

TWO = ("--drafter", "auto", "--drafter", "none")


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Five prompts, for figures of this process."""
    monkeypatch.setattr(comparison, "in_own_process", comparison.measure)
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join("abcde"))
    return "--prompts", str(path)


def test_every_drafter_runs_at_every_load_and_each_prompt_once_per_mode(wingbeat, prompts):  # noqa: F811
    llm, loads = FakeLLM(), ("--batch-size", "1,4")
    got = wingbeat("bench", *TWO, *prompts, *loads, "--max-tokens", "20", "--price-per-hour", "3.6", "--json", llm=llm)
    found = json.loads(got.out)
    runs = found["runs"]
    assert [(one["drafter"], one["batch_size"]) for one in runs] == [
        *(("auto", 1), ("none", 1)),
        *(("auto", 4), ("none", 4)),
    ]
    assert list(found["fastest"]) == ["1", "4"]
    for one in runs:
        assert (one["num_prompts"], one["num_tokens"], one["same_tokens"]) == (5, 100, True)
        assert one["dollars_per_million_tokens"] == pytest.approx(1000 / one["speculative_tokens_per_s"], rel=0.01)
        assert one["memory_mib"] > 1
    asked = Counter((tuple(prompt), params.speculation) for prompt, params in llm.seen if params.max_tokens == 20)
    assert {*asked.values()} == {len(runs)}
    assert got.err.splitlines()[0] == "wingbeat: auto, 1 at once"


def test_loads_are_three_unless_they_are_given(wingbeat, prompts, tmp_path: Path):  # noqa: F811
    (tmp_path / "prompts.txt").write_text("x\n" * 16)
    got = wingbeat("bench", *TWO, *prompts, "--max-tokens", "8", llm=FakeLLM())
    assert got.code == 0
    assert got.err.count("at once") == 6
    words = ("auto", "none", "over", "a round", "break-", "MiB", "fastest: ", " at 16", "16 answers")
    assert all(word in got.out for word in words)


def test_a_ratio_above_one_is_one_of_tokens_a_round_above_break_even():
    plain = Pass(14.0, 10.0, 100, 100, [[1] * 101], SpeculationMetrics())
    speculative = Pass(12.0, 8.0, 40, 100, [[1] * 101], SpeculationMetrics(30, 90, 60, [30, 30]))
    report = report_of({True: [speculative, speculative], False: [plain, plain]})
    assert (report.tokens_a_round, report.break_even) == (2.5, pytest.approx(2.0))
    assert report.tokens_a_round / report.break_even == pytest.approx(plain.decode_s / speculative.decode_s)
    assert report.speedup == pytest.approx(14 / 12)
    assert report_of({True: [plain], False: [plain]}).break_even is None


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ("--drafter auto --drafter eagel", "eagel"),
        ("--drafter auto --drafter none --repeat 2", "--repeat 2"),
        ("--drafter auto --drafter none --num-prompts 3", "--batch-size 4: there are 3 prompts"),
        ("--batch-size 1,0", "--batch-size 0"),
        ("--batch-size 1,many", "--batch-size many"),
        ("--price-per-hour 0", "--price-per-hour 0"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(wingbeat, prompts, options: str, hint: str):  # noqa: F811
    got = wingbeat("bench", *options.split(), *prompts)
    assert (got.code, got.out, got.err.count("\n")) == (2, "", 1)
    assert hint in got.err


def test_each_drafter_of_the_demo_pair_has_a_process(capsys):
    options = ["--batch-size", "2", "--num-prompts", "2", "--max-tokens", "16", "--no-adaptive", "--threads", "1"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--drafter", "auto", *options, "--price-per-hour", "1", "--device", "cpu", "--json"])
    (one,) = json.loads(capsys.readouterr().out)["runs"]
    assert (ended.value.code, one["drafter"], one["same_tokens"]) == (0, "auto", True)
    assert one["tokens_a_round"] > 1
    assert one["break_even_tokens_a_round"] > 0


def test_what_a_process_raises_is_one_line_with_its_drafter(wingbeat, monkeypatch):  # noqa: F811
    monkeypatch.setattr(comparison, "ProcessPoolExecutor", lambda number, **_: ThreadPoolExecutor(number))
    llm = FakeLLM()
    llm.tokenizer = None
    got = wingbeat("bench", *TWO, llm=llm)
    assert (got.code, got.out) == (2, "")
    said = "wingbeat: --drafter auto: the model has no tokenizer: bench needs text prompts"
    assert got.err.splitlines()[1] == got.err.splitlines()[-1] == said


def test_a_run_that_fails_is_left_out_and_named(wingbeat, monkeypatch, prompts):  # noqa: F811
    def in_own_process(run):
        if run.drafter[0] == "auto":
            raise UserError("--drafter auto: no memory is left")
        return comparison.measure(run)

    monkeypatch.setattr(comparison, "in_own_process", in_own_process)
    got = wingbeat("bench", *TWO, *prompts, "--batch-size", "2", "--max-tokens", "8", "--json", llm=FakeLLM())
    found = json.loads(got.out)
    assert [row["drafter"] for row in found["runs"]] == ["none"]
    assert found["failed"] == {"auto, 2 at once": "--drafter auto: no memory is left"}
