"""The Serve application on engines, on a CPU by ONNX Runtime, seen by the openai client."""

import pytest
import torch

from tests.conftest import running
from tests.runtime.models import DEMO_PAIR, greedy, prepare_model, random_head, random_model
from tests.runtime.tensorrt.engine_world import LIMITS
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.tokenizer import Tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NUM_TOKENS = 24


def test_the_openai_client_gets_the_text_of_generate(ray_cluster, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from wingbeat.runtime.tensorrt.build import BuildPlan, export_directory

    model, head = tmp_path / "model", tmp_path / "head"
    verifier = random_model("llama", num_hidden_layers=4, vocab_size=4096)
    verifier.save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_bytes((DEMO_PAIR / "verifier" / name).read_bytes())
    loaded = prepare_model(verifier, "llama")
    save_eagle_head(random_head(loaded), head)
    export_directory(BuildPlan(model, head, tmp_path / "engines", torch.float32, LIMITS))
    tokenizer = Tokenizer.load(model)
    prompts = ["import os", "def parse(text):\n    ", "class Queue:\n"]
    options = {"model": model, "drafter": str(head), "engine_dir": tmp_path / "engines"}
    with running(
        "engines",
        ray_cluster,
        **options,
        device="cpu",
        max_num_seqs=4,
        allow_bad_drafter=True,
        adaptive=False,
        served_model_name="wingbeat-demo",
    ) as app:
        for prompt in prompts:
            ids = tokenizer.encode(prompt)
            response = app.complete(prompt, max_tokens=NUM_TOKENS)
            assert response.choices[0].text == tokenizer.decode(greedy(loaded.model, [ids], NUM_TOKENS)[0][0])
            assert response.metrics["speculative_decoding"]["num_drafts"] > 0
        app.check_integrity()
