"""lm-eval as it is installed: the same scores through the server as with transformers' model in its own process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL
from wingbeat.runtime.demo import demo_pair

pytestmark = [pytest.mark.clients, pytest.mark.slow]
DOCUMENTS = [
    {"text": "import os\nimport sys\n\n\ndef main(", "right": "argv", "wrong": "banana"},
    {"text": "class Reader:\n    def __init__(self", "right": "):\n", "wrong": " while"},
    {"text": "for index in ", "right": "range", "wrong": "import"},
    {"text": "if value is None:\n        return ", "right": "None", "wrong": "else"},
    {"text": "raise ValueError(", "right": "'", "wrong": "class"},
]
CHOICE = {
    "task": "local_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{[right, wrong]}}",
    "doc_to_target": 0,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
TEXT = {
    "task": "local_text",
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{right}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> tuple[Any, list[str]]:
    """Both tasks over local data, as lm-eval finds them."""
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks")
    folder: Path = tmp_path_factory.mktemp("tasks")
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}}
    for task in (CHOICE, TEXT):
        # A file of JSON is one of YAML.
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**task, **data, "test_split": "test"}))
    return lm_eval_tasks.TaskManager(include_path=str(folder), include_defaults=False), ["local_choice", "local_text"]


def evaluated(model: str, options: dict[str, Any], tasks: tuple[Any, list[str]]) -> dict[str, Any]:
    """Scores by task, log-likelihoods and texts by document."""
    import lm_eval

    manager, names = tasks
    found = lm_eval.simple_evaluate(
        model=model, model_args=options, tasks=names, task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    samples = {name: sorted(found["samples"][name], key=lambda sample: sample["doc_id"]) for name in names}
    return {
        "accuracy": found["results"]["local_choice"]["acc,none"],
        "exact_match": found["results"]["local_text"]["exact_match,none"],
        "log_likelihoods": [resps[0][0] for one in samples["local_choice"] for resps in one["resps"]],
        "texts": [one["resps"][0][0] for one in samples["local_text"]],
    }


def test_the_scores_are_those_of_the_hf_backend(url, tasks):
    verifier = str(demo_pair().verifier)
    server = {"model": MODEL, "base_url": f"{url}/v1/completions", "tokenizer": verifier, "num_concurrent": 2}
    served = evaluated("local-completions", {**server, "tokenizer_backend": "huggingface"}, tasks)
    local = evaluated("hf", {"pretrained": verifier, "dtype": "float32", "device": "cpu"}, tasks)
    assert served["texts"] == local["texts"]
    assert any(served["texts"])
    likelihoods = [[float(value) for value in one["log_likelihoods"]] for one in (served, local)]
    assert likelihoods[0] == pytest.approx(likelihoods[1], abs=1e-3)
    assert served["accuracy"] == local["accuracy"] > 0.5
    assert served["exact_match"] == local["exact_match"]
