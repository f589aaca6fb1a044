"""`serve deploy`, as an operator calls it, on a cluster that runs: the examples, an update under load, and joining."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.operators_cluster import START_S, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "serve").glob("*.yaml"))
ON_A_GPU = ("model", "drafter", "dtype", "device", "num_gpus_per_verifier", "num_gpus_per_drafter")
NUM_STREAMS = 4
LONG_TOKENS = 500


def on_this_machine(path: Path, port: int, **args: Any) -> dict[str, Any]:
    """An example as it is, but for the port, and for what needs a GPU or a model from elsewhere."""
    document = yaml.safe_load(path.read_text())
    document["http_options"]["port"] = port
    (application,) = document["applications"]
    given = application["args"]
    if "model" in given:
        given = {name: value for name, value in given.items() if name not in ON_A_GPU} | {"max_model_len": 1024}
        given |= {"kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 8}
    application["args"] = given | args
    return document


def completion(cluster: Cluster, prompt: str, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=START_S)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_can_be_deployed_and_answers(cluster: Cluster, path: Path, tmp_path: Path):
    document = on_this_machine(path, cluster.port)
    cluster.deploy(document, tmp_path)
    cluster.wait_until_it_runs()
    answer = completion(cluster, "def main(")
    assert answer.status_code == 200, answer.text
    (application,) = document["applications"]
    assert answer.json()["model"] == application["args"]["served_model_name"]
    assert len(cluster.replicas("Verifier")) == application["args"].get("num_replicas", 1)


def stream(cluster: Cluster, index: int) -> str:
    """One streamed answer; half of them sample. Raises where it breaks."""
    body = {
        "prompt": f"def function_{index}(self, name):\n    ",
        "max_tokens": LONG_TOKENS,
        "temperature": 0.8 * (index % 2),
        "seed": index,
        "ignore_eos": True,
        "stream": True,
    }
    text, finished = [], False
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=START_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                finished = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += [choice["text"] for choice in event["choices"]]
    assert finished
    return "".join(text)


def test_an_update_under_load_loses_no_request_and_changes_no_text(cluster: Cluster, tmp_path: Path):
    settings = {"num_replicas": 2, "num_router_replicas": 2, "shutdown_timeout_s": 120}
    path = ROOT / "examples" / "serve" / "demo_cpu.yaml"
    cluster.deploy(on_this_machine(path, cluster.port, **settings, max_num_seqs=4), tmp_path)
    cluster.wait_until_it_runs()
    expected = [stream(cluster, index) for index in range(NUM_STREAMS)]
    replaced = {deployment: cluster.replicas(deployment) for deployment in ("Router", "Verifier")}
    updated, answers = [], []

    def stream_until_updated(index: int) -> None:
        while True:
            last = bool(updated)
            answers.append((index, stream(cluster, index)))
            if last:
                return

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        loads = [threads.submit(stream_until_updated, index) for index in range(NUM_STREAMS)]
        time.sleep(1.0)
        before = len(answers)
        try:
            changed = on_this_machine(path, cluster.port, **settings, max_num_seqs=8, stream_interval_ms=5)
            cluster.deploy(changed, tmp_path)
            cluster.wait_until_it_runs()
        finally:
            updated.append(True)
        for load in loads:
            load.result()
    assert len(answers) > before + NUM_STREAMS
    assert [text == expected[index] for index, text in answers] == [True] * len(answers)
    for deployment, old in replaced.items():
        assert len(cluster.replicas(deployment)) == 2
        assert not cluster.replicas(deployment) & old


def test_another_user_config_changes_limits_and_speculation_of_the_same_replicas(cluster: Cluster, tmp_path: Path):
    document = on_this_machine(
        ROOT / "examples" / "serve" / "demo_cpu.yaml", cluster.port, max_num_seqs=4, adaptive=False
    )
    cluster.deploy(document, tmp_path)
    cluster.wait_until_it_runs()
    replicas = {deployment: cluster.replicas(deployment) for deployment in ("Router", "Verifier")}
    body = {"prompt": "def main():\n    ", "max_tokens": 32, "temperature": 0, "ignore_eos": True}

    def ask() -> dict[str, Any]:
        return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=START_S).json()

    def drafts(answer: dict[str, Any]) -> int:
        return (answer.get("metrics") or {}).get("speculative_decoding", {}).get("num_drafts", 0)

    drafted = ask()
    assert drafts(drafted)
    (application,) = document["applications"]
    application["deployments"] = [{"name": "Router", "user_config": {"speculation": False, "max_queued_requests": 0}}]
    cluster.deploy(document, tmp_path)
    deadline = time.monotonic() + START_S
    while drafts(plain := ask()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
    many = httpx.post(f"{cluster.url}/v1/completions", json={**body, "n": 5}, timeout=START_S)
    assert many.status_code == 400  # more than will ever run at once
    assert {deployment: cluster.replicas(deployment) for deployment in replicas} == replicas


def wingbeat_serve(cluster: Cluster, *options: str) -> subprocess.CompletedProcess:
    code = "from wingbeat.deployments.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "--address", cluster.address, "--port", str(cluster.port), *options]
    return subprocess.run(
        command, env=cluster.environ, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False
    )


def test_a_detached_application_stays_in_the_cluster_that_the_command_joined(cluster: Cluster):
    done = wingbeat_serve(cluster, "--detach", "--drafter", "ngram")
    assert done.returncode == 0, done.stderr
    assert "It stays when this command ends" in done.stdout
    assert completion(cluster, "def main(").status_code == 200
    second = wingbeat_serve(cluster, "--drafter", "ngram")
    assert second.returncode == 2
    assert "has an application named wingbeat already" in second.stderr
    assert completion(cluster, "def main(").status_code == 200
