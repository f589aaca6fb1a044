"""A child's death is noticed at once, and a child never outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tests.fakes import wait_until
from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.cluster.child_process import ChildProcess

SLEEPER = "tests.cluster.sleeping_child"


def test_how_a_child_ended_is_known_when_it_ends():
    async def scenario() -> None:
        for number in (signal.SIGKILL, signal.SIGTERM):
            child = ChildProcess(SLEEPER, ())
            os.kill(child.pid, number)
            assert await asyncio.wait_for(child.wait(), 20) == -number
            child.kill()

    asyncio.run(scenario())


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_does_not_outlive_a_parent_that_is_killed_even_where_it_is_stopped(stopped: bool):
    code = f"import time; from wingbeat.cluster.child_process import ChildProcess; c = ChildProcess({SLEEPER!r}, ());"
    code += "print(c.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n", "the child writes where its parent does"
        child = PeerProcess(pid, process_start(pid))
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not child.alive())
