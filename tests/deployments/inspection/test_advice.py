"""`wingbeat inspect --advise`: drafters that exist for a model, and the speed that a head would bring."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import torch
from huggingface_hub import constants
from transformers import Glm4MoeConfig, LlamaConfig

from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.inspection.advice import LENGTHS, advise, expectation
from wingbeat.runtime.demo import demo_pair

CPU = torch.device("cpu")
REPOSITORIES = [
    {"id": "org/Llama-small-Instruct", "downloads": 9000},
    {"id": "org/EAGLE3-Llama-small", "downloads": 800},
    {"id": "org/Llama-small-DFlash-b16", "downloads": 70},
    {"id": "org/Llama-small-speculator", "downloads": None},
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, list[str]]]]:
    """A hub that lists `REPOSITORIES`; yields the queries that it got."""
    queries: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            queries.append(parse_qs(urlparse(self.path).query))
            body = json.dumps(REPOSITORIES).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield queries
    server.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Llama-small-FP8"
    LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2).save_pretrained(folder)
    return folder


def test_heads_are_found_by_the_names_of_repositories(hub: list[dict[str, list[str]]], model: Path):
    found = advise(model, CPU)
    assert [(head["drafter"], head["kind"]) for head in found["heads"]] == [
        ("org/EAGLE3-Llama-small", "EAGLE-3"),
        ("org/Llama-small-DFlash-b16", "DFlash"),
        ("org/Llama-small-speculator", "speculator"),
        ("suffix", "earlier text"),
    ]
    assert found["hub"] is None
    assert hub[0]["search"] == ["Llama-small"]


def test_a_hub_that_cannot_be_reached_is_one_sentence(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    found = advise(model, CPU)
    assert found["hub"].startswith("the hub cannot be searched: ")
    assert [head["drafter"] for head in found["heads"]] == ["suffix"]


@pytest.mark.parametrize("answer", [{"error": "busy"}, [{"name": "x"}], ["x"], [{"id": "x", "downloads": "many"}], 7])
def test_a_hub_that_answers_something_else_is_one_sentence(hub, model, monkeypatch: pytest.MonkeyPatch, answer: Any):
    monkeypatch.setattr("tests.deployments.inspection.test_advice.REPOSITORIES", answer)
    found = advise(model, CPU)
    assert found["hub"].startswith("the hub cannot be searched: ")
    assert [head["drafter"] for head in found["heads"]] == ["suffix"]


def test_prediction_modules_are_found_by_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    config = Glm4MoeConfig(**sizes, vocab_size=128, n_routed_experts=4, num_nextn_predict_layers=1)
    config.save_pretrained(tmp_path)
    assert advise(tmp_path, CPU)["heads"][0]["drafter"] == "mtp"


def test_a_round_reads_the_model_once_and_the_head_once_per_level(model: Path):
    found = expectation(model, CPU)
    config = LlamaConfig.from_pretrained(model)
    attention = 4 * 64 * 64
    layer = attention + 3 * 64 * 128 + 2 * 64
    assert found.round_bytes == 2 * (2 * layer + 64 + 512 * 64) or config.tie_word_embeddings
    assert found.head_bytes == 2 * (layer + 4 * 64**2 + 512 * 64)
    ratios = [found.over_plain[str(length)] for length in LENGTHS]
    assert ratios == pytest.approx([length / (1 + 5 * found.head_bytes / found.round_bytes) for length in LENGTHS])
    assert found.plain_tokens_per_s is None


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_it(as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", str(demo_pair().verifier), "--advise", "--device=cpu", *(["--json"] if as_json else [])])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "suffix" in said
    assert ("over plain" in said) != as_json
    assert not as_json or json.loads(said)["hub"] == "HF_HUB_OFFLINE is set: the hub was not asked"
