"""`wingbeat bench --dataset`: questions of several kinds, each answered by plain and by speculative decoding."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.deployments.local.test_generate import FakeLLM, wingbeat  # noqa: F401
from wingbeat.deployments.bench.options import AskedOnce, BenchConfig
from wingbeat.deployments.bench.questions import Question, evenly, read_questions
from wingbeat.deployments.cli import main as cli

LINES = (
    {"question_id": 1, "category": "chat", "turns": ["Who?", "Why?"]},
    {"category": "code", "prompt": "def main("},
    {"category": "chat", "turns": ["Where?"]},
    {"prompt": "x" * 250},
)


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n\n".join(map(json.dumps, LINES)))
    return str(path)


def test_spec_bench_comes_with_the_package():
    questions = read_questions("specbench", None)
    assert len(questions) == 80
    kinds = Counter(question.category for question in questions)
    assert kinds.keys() >= {"translation", "summarization", "qa", "math_reasoning", "rag", "coding"}
    assert len(kinds) == 13
    assert len({question.category for question in read_questions("specbench", 12)}) > 6


def test_lines_have_turns_or_a_prompt(dataset: str):
    found = read_questions(dataset, None)
    assert found[:2] == [
        Question(category="chat", turns=("Who?", "Why?")),
        Question(category="code", turns=("def main(",)),
    ]
    assert found[3].category == "none"
    assert evenly("abcdef", 3) == ["a", "c", "e"]
    assert evenly("ab", 3) == ["a", "b"]


def test_figures_are_by_category_and_each_question_is_asked_once_per_mode(wingbeat, dataset: str):  # noqa: F811
    llm = FakeLLM()
    got = json.loads(wingbeat("bench", "--dataset", dataset, "--max-tokens", "20", "--json", llm=llm).out)
    assert (got["dataset"], got["num_prompts"], got["num_left_out"], got["same_tokens"]) == (dataset, 4, 1, True)
    assert {name: one["num_prompts"] for name, one in got["categories"].items()} == {"chat": 3, "code": 1}
    chat = got["categories"]["chat"]["metrics"]["speculative_decoding"]
    assert (chat["num_drafts"], chat["acceptance_length"], chat["draft_acceptance_rate"]) == (12, 2.5, 0.75)
    asked = Counter((tuple(prompt), params.speculation) for prompt, params in llm.seen if params.max_tokens == 20)
    assert len(asked) == 8
    assert {*asked.values()} == {1}


def test_a_later_turn_follows_the_answer_to_the_one_before(wingbeat, dataset: str):  # noqa: F811
    llm = FakeLLM("Me.")
    got = wingbeat("bench", "--dataset", dataset, "--batch-size", "2", "--max-tokens", "20", llm=llm)
    assert got.code == 0
    assert all(word in got.out for word in ("chat", "code", "all", "By category", "2.50", "0.75", "context: 1"))
    prompts = {llm.tokenizer.decode(prompt) for prompt, _ in llm.seen}
    assert {"Who?", "Who?\nMe.\nWhy?", "Where?"} <= prompts


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("{", "question 1: Invalid JSON"),
        ("[]", "should be an object; lines hold 'turns'"),
        ('{"turns": []}', "or 'prompt'"),
        ('{"prompt": 3}', "or 'prompt'"),
        ("", "the file holds no question"),
    ],
)
def test_a_file_without_questions_is_one_line(wingbeat, tmp_path: Path, line: str, hint: str):  # noqa: F811
    path = tmp_path / "questions.jsonl"
    path.write_text(line)
    got = wingbeat("bench", "--dataset", str(path))
    assert (got.code, got.out, got.err.count("\n")) == (2, "", 1)
    assert f"--dataset {path}" in got.err
    assert hint in got.err


@pytest.mark.parametrize("option", ["--dataset specbank", "--repeat 2 --dataset specbench", "--num-prompts 0"])
def test_a_mistake_is_one_line_and_names_the_option(wingbeat, option: str):  # noqa: F811
    got = wingbeat("bench", *option.split())
    assert (got.code, got.out, got.err.count("\n")) == (2, "", 1)
    assert " ".join(option.split()[:2]) in got.err


def test_questions_that_all_exceed_the_context_are_refused(wingbeat, dataset: str):  # noqa: F811
    got = wingbeat("bench", "--dataset", dataset, "--max-tokens", "255", llm=FakeLLM())
    assert (got.code, got.err.count("\n")) == (2, 1)
    assert "--max-tokens 255" in got.err


def test_prompts_are_computed_anew_in_each_mode():
    given = {"device": "cpu", "draft_top_k": 2, "dataset": "specbench"}
    once = AskedOnce(**BenchConfig(**given).model_dump(exclude_unset=True))
    assert not once.engine_config(1).enable_prefix_caching
    assert BenchConfig(**given).engine_config(1).enable_prefix_caching


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_the_demo_pair_gives_the_same_answers_in_both_modes(capsys, dataset: str, temperature: str):
    options = ["--dataset", dataset, "--temperature", temperature, "--max-tokens", "24", "--json", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *options, "--no-adaptive", "--threads", "1"])
    got = json.loads(capsys.readouterr().out)
    counts = [one["metrics"]["speculative_decoding"] for one in (got, *got["categories"].values())]
    assert (ended.value.code, got["same_tokens"], got["num_prompts"]) == (0, True, 5)
    assert counts[0]["num_drafts"] == sum(one["num_drafts"] for one in counts[1:]) > 0
