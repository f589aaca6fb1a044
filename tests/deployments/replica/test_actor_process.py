"""A drafter's process is ended by its name alone, and also where it is stopped."""

import signal
import subprocess
import sys

from wingbeat.cluster.channels.doorbell import process_start
from wingbeat.deployments.replica.actor_process import kill_here


def test_a_stopped_process_is_ended_and_one_that_has_its_id_by_chance_is_not():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = process_start(process.pid)
        process.send_signal(signal.SIGSTOP)
        kill_here(process.pid, start + 1)
        assert process.poll() is None
        kill_here(process.pid, start)
        assert process.wait(30) == -signal.SIGKILL
        kill_here(process.pid, start)
