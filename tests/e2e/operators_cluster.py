"""A Ray that somebody else has started on this machine, and what its operator does with it."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.ports import free_port
from wingbeat.cluster.process_tree import descendants

ROOT = Path(__file__).parents[2]
START_S = 300.0
ON_A_GPU = ("model", "drafter", "dtype", "device", "num_gpus_per_verifier", "num_gpus_per_drafter")
HOLD_A_CLUSTER = """
import json, sys, ray
context = ray.init(num_cpus=8, num_gpus=0, include_dashboard=True, dashboard_port=int(sys.argv[1]),
                   object_store_memory=200 * 2**20, log_to_driver=False)
print(json.dumps([context.address_info["gcs_address"], context.dashboard_url]), flush=True)
sys.stdin.read()
"""


class Cluster:
    """A Ray that somebody else has started on this machine, and the commands of its operator."""

    def __init__(self, folder: Path) -> None:
        self.port, dashboard_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environ = {**os.environ, "RAY_TMPDIR": str(folder), "RAY_raylet_start_wait_time_s": "240"}
        token = secrets.token_hex(32)
        self.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        self._headers = {"Authorization": f"Bearer {token}"}
        self.environ.pop("RAY_ADDRESS", None)
        self.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._holder = subprocess.Popen(
            [sys.executable, "-c", HOLD_A_CLUSTER, str(dashboard_port)],
            env=self.environ,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        line = next((line for line in self._holder.stdout if line.startswith("[")), None)
        assert line is not None, "Ray has not started; its error is above"
        self.address, dashboard = json.loads(line)
        self._dashboard = f"http://{dashboard}"

    def serve(self, *words: str) -> str:
        """Output of Serve's command line, called on this cluster."""
        return self._run(*words, "-a", self._dashboard)

    def _run(self, *words: str) -> str:
        command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", *words]
        done = subprocess.run(
            command, env=self.environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert not done.returncode, done.stderr
        return done.stdout

    def deploy(self, document: dict[str, Any], folder: Path) -> None:
        """`serve deploy`; returns before anything has been started."""
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(document))
        self.serve("deploy", str(file))

    def applications(self) -> dict[str, dict[str, Any]]:
        """By name, as Serve's REST interface shows them."""
        url = f"{self._dashboard}/api/serve/applications/"
        return httpx.get(url, headers=self._headers, timeout=60).json()["applications"]

    def application(self) -> dict[str, Any]:
        """The one application."""
        (application,) = self.applications().values()
        return application

    def replicas(self, deployment: str) -> set[str]:
        """Names of a deployment's replicas that run."""
        replicas = self.application()["deployments"][deployment]["replicas"]
        return {replica["replica_id"] for replica in replicas if replica["state"] == "RUNNING"}

    def wait_until_it_runs(self) -> None:
        """Until every application does; raises where one does not, with what Serve says."""
        deadline = time.monotonic() + START_S
        while waiting := [one for one in self.applications().values() if one["status"] != "RUNNING"]:
            assert all(one["status"] in ("DEPLOYING", "NOT_STARTED", "UNHEALTHY") for one in waiting), waiting
            assert time.monotonic() < deadline, waiting
            time.sleep(1.0)

    def shut_down(self) -> None:
        """`serve shutdown`, proxies included."""
        self.serve("shutdown", "-y")

    def status(self) -> dict[str, Any]:
        """`serve status`."""
        return yaml.safe_load(self.serve("status"))

    def build(self, what: str, file: Path) -> dict[str, Any]:
        """`serve build`; what it wrote."""
        self._run("build", what, "-o", str(file))
        return yaml.safe_load(file.read_text())

    def close(self) -> None:
        """End the Ray that was started."""
        self._holder.stdin.close()
        self._holder.wait(60)

    def num_engines(self) -> int:
        """Processes below this Ray that are engines."""
        pids = [process.pid for process in descendants(self._holder.pid)]
        return sum("-m wingbeat.deployments.replica.engine" in command_line(pid) for pid in pids)


def command_line(pid: int) -> str:
    """Command line of a process; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


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
