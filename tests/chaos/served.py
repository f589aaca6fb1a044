"""A `wingbeat serve` with a Ray of its own, and the processes of it that are not engines."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import ROOT
from tests.ports import free_port
from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR
from wingbeat.cluster.process_tree import descendants
from wingbeat.runtime.drafters.choice import FALLBACK

START_S = 300.0
GONE_S = 90.0
OPTIONS = {
    "drafter": FALLBACK.kind,
    "draft-steps": 1,
    "max-num-seqs": 16,
    "engine-factory": "tests.hostile.slow_engine:build_slow_engine",
    "shutdown-timeout-s": 5,
}
NAMES = {
    "router": "ray::ServeReplica:wingbeat:Router",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
    "raylet": "/raylet ",
    "head": "/gcs_server ",
}
"""By kind, what the command of such a process holds."""


class Served:
    """A server; with several routers, Serve's proxy is in front of them."""

    def __init__(self, num_routers: int = 1) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="wbf"))  # Ray's sockets need a short path
        self.port = free_port()
        options = OPTIONS | {"port": self.port, "num-router-replicas": num_routers}
        command = [sys.executable, "-c", "from wingbeat.deployments.cli.main import main; main()", "serve"]
        command += ["--no-adaptive", *(f"--{name}={value}" for name, value in options.items())]
        environ = {**os.environ, "RAY_TMPDIR": str(self._folder), "RAY_raylet_start_wait_time_s": "180"}
        # Other programs' memory is no reason to kill anything here: only the adversary does.
        environ["RAY_memory_monitor_refresh_ms"] = "0"
        environ.pop("RAY_ADDRESS", None)
        self.log = self._folder / "log"
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        self._seen: dict[int, PeerProcess] = {}
        try:
            self.until(lambda: "Serving on" in self.log.read_text(), START_S)
        except BaseException:
            self.close()
            raise

    def until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait for the condition; fails where the server ends first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.launcher.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def pids(self, kind: str) -> list[int]:
        """Processes of a kind, the oldest first."""
        if kind == "launcher":
            return [self.launcher.pid]
        return [process.pid for process in self.processes() if NAMES[kind] in _command(process.pid)]

    def processes(self) -> list[PeerProcess]:
        """All below the launcher; what was seen once is remembered."""
        there = descendants(self.launcher.pid)
        self._seen |= {process.pid: process for process in there}
        return sorted(there, key=lambda process: process.start)

    def left(self) -> list[str]:
        """Processes that still run, and segments that remain, after the launcher has ended."""
        running = [f"{process.pid} {_command(process.pid)}" for process in self._seen.values() if process.alive()]
        owners = {f".{pid}" for pid in self._seen}
        return running + [path.name for path in SHM_DIR.glob(f"{PREFIX}*") if path.suffix in owners]

    def gone_after(self) -> float:
        """Seconds until nothing is left of it; fails where something stays."""
        started = time.monotonic()
        while left := self.left():
            assert time.monotonic() < started + GONE_S, left
            time.sleep(0.05)
        return time.monotonic() - started

    def close(self) -> None:
        """End all of it at once."""
        self.processes()
        self.launcher.kill()
        self.launcher.wait()
        for process in self._seen.values():
            if process.alive():
                os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


def own(pid: int) -> PeerProcess:
    """A process, to be asked later whether it is that very one that still runs."""
    return PeerProcess(pid, process_start(pid))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace") + " "
    except (FileNotFoundError, ProcessLookupError):
        return ""
