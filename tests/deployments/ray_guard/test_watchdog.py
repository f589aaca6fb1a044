"""A killed launcher leaves no process of its Ray, not even stopped ones; without Ray."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.process_tree import descendants
from wingbeat.deployments.ray_guard.watchdog import writers

CHILD = "import sys, time; log = open(sys.argv[1], 'a'); print('up', flush=True); time.sleep(600)"
LAUNCHER = f"""
import subprocess, sys
from pathlib import Path
from wingbeat.deployments.ray_guard.watchdog import Watchdog
folder = Path(sys.argv[1])
watchdog = Watchdog(folder)
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, folder / "its.log"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, watchdog.pid, flush=True)
if sys.stdin.readline() == "close\\n":
    watchdog.close()
    print("closed", flush=True)
sys.stdin.read()
"""


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal."""
    (mask,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")]
    return bool(int(mask.split()[1], 16) & 1 << (number - 1))


@pytest.mark.parametrize("stopped", [False, True])
def test_what_writes_a_killed_launchers_logs_is_ended(tmp_path: Path, until: Callable, stopped: bool):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, tmp_path], **pipes) as launcher:
        child, watchdog = (PeerProcess(pid, process_start(pid)) for pid in map(int, launcher.stdout.readline().split()))
        if stopped:
            os.kill(child.pid, signal.SIGSTOP)
        # A service manager signals every process; the watchdog must ignore the signal.
        until(lambda: ignores(watchdog.pid, signal.SIGTERM), 30.0)
        os.kill(watchdog.pid, signal.SIGTERM)
        assert child.alive()
        launcher.kill()
        until(lambda: not child.alive() and not watchdog.alive(), 30.0)


def test_a_launcher_that_ends_in_order_sends_it_away_before(tmp_path: Path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, tmp_path], **pipes) as launcher:
        launcher.stdout.readline()
        launcher.stdin.write("close\n")
        launcher.stdin.flush()
        assert launcher.stdout.readline() == "closed\n"
        (child,) = descendants(launcher.pid)
        assert child.alive()
        os.kill(child.pid, signal.SIGKILL)
        launcher.kill()


@pytest.mark.parametrize(("mode", "found"), [("a", True), ("r", False)])
def test_who_writes_below_a_folder_is_found_and_who_reads_is_not(tmp_path: Path, mode: str, found: bool):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "its.log"
    log.touch()
    held = f"import time; log = open({str(log)!r}, {mode!r}); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        assert [one.pid for one in writers(tmp_path)] == [process.pid] * found
        process.kill()
