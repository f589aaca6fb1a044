"""Adapters that operators load and unload while requests run, in the real application behind Serve's proxy."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import MODEL, App
from tests.runtime.lora_world import write_adapter
from wingbeat.runtime.demo import demo_pair

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPTS = ("def main():\n    ", "class Queue:\n    ", "import os\n")
NAMES = ("one", "two", "three")
SETTINGS = {"drafter": "none", "max_model_len": 256, "num_kv_blocks": 64, "max_loras": 2, "max_lora_rank": 8}
NUM_CLIENTS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters of the demo's verifier, one more than an engine holds."""
    root = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(demo_pair().verifier)
    for seed, name in enumerate(NAMES):
        write_adapter(root / name, model, seed=seed, std=0.3)
    return root


def operate(app: App, what: str, **fields: str) -> None:
    answer = app.http.post(f"/v1/{what}_lora_adapter", json=fields, timeout=60)
    assert answer.status_code == 200, answer.text


def text(app: App, model: str, prompt: str) -> str:
    return app.complete(prompt, model=model, max_tokens=8).choices[0].text


@contextmanager
def traffic(app: App) -> Iterator[list[str]]:
    """Clients of the base model for as long as the block lasts; notes every answer, each of which must be known."""
    expected, answers, over = [text(app, MODEL, prompt) for prompt in PROMPTS], [], threading.Event()

    def ask() -> None:
        while not over.is_set():
            got = [text(app, MODEL, prompt) for prompt in PROMPTS]
            assert got == expected
            answers.extend(got)

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(ask) for _ in range(NUM_CLIENTS)]
        try:
            yield answers
        finally:
            over.set()
        for client in clients:
            client.result()


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_adapters_loaded_used_and_unloaded_under_traffic_lose_nothing(start_app, folder, num_replicas: int, times: int):
    with start_app("adapters", num_replicas=num_replicas, lora_update_dir=folder, **SETTINGS) as app:
        expected = {}
        for name in NAMES:
            operate(app, "load", lora_name=name, lora_path=name)
            expected[name] = text(app, name, PROMPTS[0])
            operate(app, "unload", lora_name=name)
        assert len(set(expected.values())) == len(NAMES)
        with traffic(app) as answers:
            for index in range(times):
                name, called = NAMES[index % len(NAMES)], f"adapter {index}"
                operate(app, "load", lora_name=called, lora_path=name)
                assert text(app, called, PROMPTS[0]) == expected[name]
                operate(app, "unload", lora_name=called)
        print(f"{num_replicas} replicas: {times} adapters; {len(answers)} requests beside them, none failed")
        assert answers
        assert [model.id for model in app.client.models.list().data] == [MODEL]
        app.check_integrity()
