"""A start tests the drafter across processes: a bad one is refused, an ambiguous one gets the right convention."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.demo import demo_pair

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
APP = "checked"
PROMPT = "class Stack:\n    def __init__(self):\n        "


@pytest.fixture(scope="module")
def mislabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's head in a file that does not state its feedback and whose likeliest convention is wrong."""
    folder = tmp_path_factory.mktemp("heads") / "mislabelled"
    shutil.copytree(demo_pair().drafter, folder)
    config = json.loads((folder / "config.json").read_text()) | {"norm_output": True}
    config.pop("wingbeat_convention", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of the demo's shape that has learnt nothing."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("heads") / "random"
    shutil.copytree(demo_pair().drafter, folder)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    random = {name: torch.randn_like(value) if value.is_floating_point() else value for name, value in tensors.items()}
    save_file(random, folder / "model.safetensors")
    return folder


def engine_stats(app: str) -> dict:
    from ray import serve

    return serve.get_deployment_handle("Verifier", app).stats.remote().result(timeout_s=60)


@pytest.mark.slow
def test_a_reading_that_was_found_is_the_drafters_and_its_successors(ray_cluster: str, mislabelled: Path):
    from ray import serve

    from wingbeat.deployments.app import build

    config = AppConfig(drafter=str(mislabelled), draft_steps=5, adaptive=False, max_model_len=512, num_kv_blocks=600)
    serve.run(build(config), name=APP, route_prefix=f"/{APP}")
    try:
        with httpx.Client(base_url=f"{ray_cluster}/{APP}", timeout=120) as client:
            before = engine_stats(APP)
            assert before["drafter_state"] == "attached"
            assert before["speculation"]["num_drafts"] == before["phases"]["num_rounds"] == 0, "as if never tried"
            first = _complete(client)
            os.kill(before["drafter_pid"], signal.SIGKILL)
            deadline = time.monotonic() + 60
            while (now := engine_stats(APP))["drafter_state"] != "attached" or now["drafter_incarnation"] == 1:
                assert time.monotonic() < deadline, "no drafter came back"
                time.sleep(0.1)
            num_drafts = first["speculation"]["num_drafts"]
            assert now["speculation"]["num_drafts"] == num_drafts, "tried once, not for every drafter"
            assert _complete(client) == first
    finally:
        serve.delete(APP)
    assert first["speculation"] == _in_process(mislabelled, norm_output=False)
    assert first["speculation"] != _in_process(mislabelled, norm_output=True)


def _complete(client: httpx.Client) -> dict:
    body = {"model": "wingbeat-demo", "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return {"speculation": answer["metrics"]["speculative_decoding"], "text": answer["choices"][0]["text"]}


def _in_process(head: Path, norm_output: bool) -> dict:
    """Report of an equal request in process, with the head read under the given convention."""
    import torch

    from wingbeat.cluster.channels.channel import InProcessChannel
    from wingbeat.runtime.config import EngineConfig, SpeculationConfig
    from wingbeat.runtime.drafters.registry import load_drafter
    from wingbeat.runtime.heads.contract import HeadConvention
    from wingbeat.runtime.heads.target import TargetDescription
    from wingbeat.runtime.llm import build_engine
    from wingbeat.runtime.scheduling.request import Request, SamplingParams
    from wingbeat.runtime.tokenizer import Tokenizer
    from wingbeat.runtime.verifier.loading.loader import load_model

    model = demo_pair().verifier
    speculation = SpeculationConfig.default("cpu", draft_steps=5, adaptive=False)
    drafter = load_drafter(head, TargetDescription.from_checkpoint(model), speculation)
    drafter.read_as(HeadConvention((2, 12, 21), norm_output=norm_output))
    loaded = load_model(model, torch.float32, torch.device("cpu"))
    limits = EngineConfig(max_model_len=512, num_kv_blocks=600, speculation=speculation)
    engine = build_engine(loaded, limits, drafter, InProcessChannel)
    prompt = Tokenizer.load(model).encode(PROMPT)
    engine.add_request(Request("0", tuple(prompt), SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)))
    while engine.has_unfinished_requests():
        last = engine.step()
    return last[0].metrics.as_dict()


def test_lines_of_a_process_of_the_application_are_shown(capfd):
    """In a process of its own: a handler of this one would stay."""
    code = "import logging; from wingbeat.deployments.log import show_log as s; s(); s(); "
    code += "logging.getLogger('wingbeat.runtime.pair').info('accepted')"
    subprocess.run([sys.executable, "-c", code], check=True)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("INFO ")
    assert line.endswith("wingbeat.runtime.pair: accepted")


@pytest.mark.slow
def test_a_bad_drafter_is_the_start_error(ray_cluster: str, random_head: Path):
    from ray import serve

    from wingbeat.deployments.launch import APP_NAME, ServedApplication, StartError

    says = r"^drafter random does not suit .* is 0\.\d\d .*--allow-bad-drafter"
    try:
        with pytest.raises(StartError, match=says) as caught:
            ServedApplication(AppConfig(drafter=str(random_head), max_model_len=512, num_kv_blocks=600)).start()
        assert "\n" not in str(caught.value)
    finally:
        serve.delete(APP_NAME)
