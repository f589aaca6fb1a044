"""Signals to a real `wingbeat serve`: streams end in order, and nothing is left of its processes and channels."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR
from wingbeat.cluster.process_tree import descendants
from wingbeat.runtime.drafters.choice import FALLBACK

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
START_S = 240.0
TIMEOUT_S = 5
LONG = 1600
"""Tokens: at two a round and `ROUND_S` a round more than five times `TIMEOUT_S`."""
SHORT = 20


class Server:
    """A `wingbeat serve` with a Ray of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.output = folder / "stdout"
        self.errors = folder / "stderr"
        options = {
            "port": self.port,
            "drafter": FALLBACK.kind,
            "draft-steps": 1,
            "max-num-seqs": 4,
            "engine-factory": "tests.hostile.slow_engine:build_slow_engine",
            "shutdown-timeout-s": TIMEOUT_S,
        }
        command = [
            sys.executable,
            "-c",
            "from wingbeat.deployments.cli.main import main; main()",
            "serve",
            "--no-adaptive",
        ]
        command += [f"--{name}={value}" for name, value in options.items()]
        environ = {
            **os.environ,
            "RAY_TMPDIR": str(folder),
            "RAY_raylet_start_wait_time_s": "120",
            "PYTHONPATH": str(ROOT),
        }
        environ.pop("RAY_ADDRESS", None)
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=errors)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until the condition holds; fails where the server ends before."""
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.1)

    def channels(self) -> list[Path]:
        """Channels of its verifiers; a channel's name ends with its owner's process id."""
        owners = {f".{process.pid}" for process in descendants(self.process.pid)}
        return [path for path in SHM_DIR.glob(f"{PREFIX}*") if path.suffix in owners]

    def body(self, max_tokens: int, **fields: object) -> dict:
        prompt = "def main():\n    "
        return {"model": "wingbeat-demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}

    def stream(self, max_tokens: int, begun: list[int]) -> list[dict]:
        """Every event of a stream, `[DONE]` left out; notes in `begun` that the first one has come."""
        events = []
        with self.http.stream("POST", "/v1/completions", json=self.body(max_tokens, stream=True)) as response:
            for line in response.iter_lines():
                if line and line != "data: [DONE]":
                    events.append(json.loads(line.removeprefix("data: ")))
                    begun.append(max_tokens) if len(events) == 1 else None
        return events

    def post(self, max_tokens: int) -> httpx.Response:
        return self.http.post("/v1/completions", json=self.body(max_tokens))


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that answers requests. Ray's sockets need a short path."""
    folder = Path(tempfile.mkdtemp(prefix="wb-"))
    server = Server(folder)
    try:
        server.wait_for(lambda: "Serving" in server.output.read_text())
        yield server
    finally:
        for process in [*descendants(server.process.pid)]:
            os.kill(process.pid, signal.SIGKILL)
        server.process.kill()
        server.process.wait()
        server.http.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_sigterm_lets_streams_end_refuses_new_requests_and_leaves_nothing_behind(server: Server):
    processes, channels = descendants(server.process.pid), server.channels()
    assert channels
    begun: list[int] = []
    with ThreadPoolExecutor(3) as threads:
        long = threads.submit(server.stream, LONG, begun)
        whole = threads.submit(server.post, LONG)
        short = threads.submit(server.stream, SHORT, begun)
        server.wait_for(lambda: len(begun) == 2)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.http.get("/health").status_code == 503)
        refused = server.post(1)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert [choice["finish_reason"] for event in short.result()[-1:] for choice in event["choices"]] == ["length"]
        first, *_, last = long.result()
        assert first["choices"]
        assert last["error"]["code"] == "engine_unavailable"
        assert whole.result().status_code == 503
    assert server.process.wait(60) == 0
    errors = server.errors.read_text()
    assert "***" not in errors, errors
    assert "Traceback" not in errors, errors
    assert not any(process.alive() for process in processes)
    assert not any(path.exists() for path in channels)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_streams_and_leaves_nothing_behind(server: Server, number: int):
    processes, channels = descendants(server.process.pid), server.channels()
    begun: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(server.stream, LONG, begun)
        server.wait_for(lambda: begun)
        server.process.send_signal(number)
        server.wait_for(lambda: "Stopping" in server.output.read_text())
        server.process.send_signal(number)
        assert server.process.wait(60) == 128 + number
        assert isinstance(stream.exception(), httpx.HTTPError)
    assert "***" not in server.errors.read_text()
    assert not any(process.alive() for process in processes)
    assert not any(path.exists() for path in channels)


def test_a_killed_router_refuses_nobody_and_a_killed_launcher_leaves_nothing(server: Server, until: Callable):
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(3)]
    for connection in idle:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in connection.recv(4096)
    for _ in range(2):
        (router,) = [one for one in descendants(server.process.pid) if "wingbeat:Router" in command(one.pid)]
        os.kill(router.pid, signal.SIGKILL)
        until(lambda router=router: not router.alive())
        with httpx.Client(base_url=server.http.base_url, timeout=120) as client:
            assert client.post("/v1/completions", json=server.body(SHORT)).status_code == 200
    processes, channels = descendants(server.process.pid), server.channels()
    assert channels
    server.process.kill()
    until(lambda: not any(process.alive() for process in processes))
    until(lambda: not any(path.exists() for path in channels))


def command(pid: int) -> str:
    """Command line of a process; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
