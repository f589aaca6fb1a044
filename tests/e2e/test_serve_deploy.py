"""`serve build`, `deploy`, `status` and `shutdown`, as an operator calls them, on a cluster that runs: the examples, an
update under load, and joining."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.operators_cluster import START_S, Cluster, completion, on_this_machine
from wingbeat.runtime.drafters.choice import FALLBACK

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "serve").glob("*.yaml"))
NUM_STREAMS = 4
LONG_TOKENS = 500


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


def test_what_serve_build_writes_is_deployed_told_of_and_shut_down(cluster: Cluster, tmp_path: Path):
    document = cluster.build("wingbeat.deployments.app:app", tmp_path / "built.yaml")
    (application,) = document["applications"]
    assert application["import_path"] == "wingbeat.deployments.app:app"
    assert {deployment["name"] for deployment in application["deployments"]} == {"Router", "Verifier"}
    document["http_options"] |= {"host": "127.0.0.1", "port": cluster.port}
    cluster.deploy(document, tmp_path)
    cluster.wait_until_it_runs()
    assert completion(cluster, "def main(").status_code == 200
    assert cluster.num_engines() == 1
    status = cluster.status()
    (told,) = status["applications"].values()
    assert told["status"] == "RUNNING"
    assert {name: one["status"] for name, one in told["deployments"].items()} == {
        "Router": "HEALTHY",
        "Verifier": "HEALTHY",
    }
    assert set(status["proxies"].values()) == {"HEALTHY"}
    cluster.shut_down()
    assert cluster.status()["applications"] == {}
    assert cluster.num_engines() == 0
    with pytest.raises(httpx.ConnectError):
        completion(cluster, "def main(")


def stream(cluster: Cluster, index: int) -> str:
    """Text of a streamed answer; every second index samples. Raises if the stream breaks."""
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


def wingbeat_serve(cluster: Cluster, *options: str) -> subprocess.CompletedProcess:
    code = "from wingbeat.deployments.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "--address", cluster.address, "--port", str(cluster.port), *options]
    return subprocess.run(
        command, env=cluster.environ, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False
    )


def test_a_detached_application_stays_in_the_cluster_that_the_command_joined(cluster: Cluster):
    done = wingbeat_serve(cluster, "--detach", "--drafter", FALLBACK.kind)
    assert done.returncode == 0, done.stderr
    assert "keeps running after this command" in done.stdout
    assert completion(cluster, "def main(").status_code == 200
    second = wingbeat_serve(cluster, "--drafter", FALLBACK.kind)
    assert second.returncode == 2
    assert "has an application named wingbeat already" in second.stderr
    assert completion(cluster, "def main(").status_code == 200
