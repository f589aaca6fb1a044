"""Adapters on top of weights that are pushed."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.greedy_texts import PROMPTS, generated, text, texts
from tests.e2e.test_weights_update import push
from tests.runtime.lora_world import merge, write_adapter
from tests.runtime.pushed_folder import pushed_folder
from wingbeat.runtime.demo import demo_pair

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_adapters_stay_and_versions_of_the_head_go_on(start_app, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(demo_pair().verifier)
    write_adapter(tmp_path / "adapters" / "one", model, seed=1, std=0.3)
    adapted = partial(merge, folder=tmp_path / "adapters" / "one")
    folder = pushed_folder(tmp_path / "step-1", std=0.02)
    settings = {"learn": {"trains": False, "dir": tmp_path / "heads"}, "lora_update_dir": tmp_path / "adapters"}
    with start_app("weights-names", max_loras=1, max_lora_rank=8, **settings) as app:
        loaded = app.http.post("/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": "one"}, timeout=60)
        assert loaded.status_code == 200, loaded.text
        heads = Path(app.http.get("/v1/drafter").json()["folder"])
        assert text(app, PROMPTS[0], model="one") == generated(demo_pair().verifier, adapted)[0]
        push(app, folder)
        assert text(app, PROMPTS[0], model="one") == generated(folder, adapted)[0]
        assert text(app, PROMPTS[0]) == generated(folder)[0]
        # A trainer pushes a head beside the weights: by the same folder as before, and it is drafted by.
        shutil.copytree(demo_pair().drafter, heads / "incoming" / "step-1")
        promoted = app.http.post("/v1/drafter/promote", json={"folder": "step-1"}, timeout=60)
        assert promoted.status_code == 200, promoted.text
        assert texts(app) == generated(folder)[:3]
        assert app.engine()["head_version"] == promoted.json()["served"] == 1
