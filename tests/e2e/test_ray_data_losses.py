"""The Ray Data pipeline of docs/offline.md loses no prompt while a drafter and a replica die and weights change."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import App
from tests.e2e.test_offline_document import blocks
from tests.runtime.pushed_folder import FILE, pushed_folder
from wingbeat.runtime.demo import demo_pair

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("pandas", "pyarrow", "aiohttp"))), reason="ray[data] is not installed"
    ),
]
NUM_TOKENS = 32
"""`max_tokens` of the document."""
TEXTS = [f"{line}_{index}" for line in ("import os", "def main", "class Stack", "from sys") for index in range(10)]
NUM_REPLICAS, MAX_NUM_SEQS = 2, 16
LIMITS = {"num_replicas": NUM_REPLICAS, "max_num_seqs": MAX_NUM_SEQS}
STEP_S = 600.0


def plain_texts(folder: Path) -> dict[str, str]:
    """transformers' own greedy continuations by the weights in a folder."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    found = {}
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        made = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        found[text] = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return found


def num_answered(app: App) -> int:
    found = re.findall(r"^vllm:request_success_total{.*} ([\d.e+]+)$", app.http.get("/metrics").text, re.M)
    return int(sum(map(float, found)))


def update(app: App, folder: Path) -> float:
    """Seconds of an update, while which no round runs."""
    begun = time.perf_counter()
    for path, body in (
        ("start_weight_update", {}),
        ("update_weights", {"update_info": {"files": [str(folder / FILE)]}}),
        ("finish_weight_update", {}),
    ):
        answer = app.http.post(f"/{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
    return time.perf_counter() - begun


@pytest.mark.parametrize("num_prompts", [240, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_prompt_is_lost(start_app, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until, num_prompts: int):
    monkeypatch.chdir(tmp_path)
    prompts = [TEXTS[index % len(TEXTS)] for index in range(num_prompts)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    folder = pushed_folder(tmp_path / "step-1")
    by_old, by_new = plain_texts(demo_pair().verifier), plain_texts(folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with start_app(f"ray-data-{num_prompts}", rollouts=True, adaptive=False, **LIMITS) as app:
        first, second = app.engines().values()
        *_, block = blocks()
        script = "import ray\n\nray.init(num_cpus=2, include_dashboard=False)\n" + block
        script = script.replace("http://127.0.0.1:8000", str(app.http.base_url).rstrip("/"))
        begun = time.perf_counter()
        with subprocess.Popen([sys.executable, "-c", script], env=kept) as pipeline:

            def reaches(share: float) -> None:
                until(lambda: num_answered(app) >= share * num_prompts or pipeline.poll() is not None, STEP_S)

            reaches(0.25)
            os.kill(first["drafter_pid"], signal.SIGKILL)
            reaches(0.5)
            pause_s = update(app, folder)
            reaches(0.7)
            os.kill(second["pid"], signal.SIGKILL)
            assert pipeline.wait(STEP_S) == 0
        print(f"{num_prompts} prompts in {time.perf_counter() - begun:.1f} s; update {pause_s:.2f} s")
    files = (tmp_path / "results").glob("*.json")
    results = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert Counter(result["prompt"] for result in results) == Counter(prompts)
    counts = Counter(
        "old" if one["text"] == by_old[one["prompt"]] else "new" if one["text"] == by_new[one["prompt"]] else "both"
        for one in results
    )
    print(dict(counts))
    assert min(counts["old"], counts["new"]) > num_prompts / 10
    # Requests that run while weights change begin with the old weights and end with the new ones.
    assert counts["both"] <= NUM_REPLICAS * MAX_NUM_SEQS
