"""Descendants of a process; none of them outlives the call that ends them."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from wingbeat.cluster.process_tree import descendants, end

FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"])
time.sleep(600)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen]:
    """A process with a child that sleeps."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_descendants_are_found_at_any_depth(parent: subprocess.Popen):
    (child,) = descendants(parent.pid)
    found = {process.pid for process in descendants(os.getpid())}
    assert {parent.pid, child.pid} <= found
    end([child], 0.0)


def test_what_outlives_its_grace_is_killed_also_where_its_parent_died_first(parent: subprocess.Popen):
    processes = descendants(parent.pid)
    parent.kill()
    parent.wait()
    assert end(processes, 0.0) == 1
    assert end(processes, 10.0) == 0
    assert not any(process.alive() for process in processes)


def test_a_process_that_ends_by_itself_is_not_killed(parent: subprocess.Popen):
    processes = descendants(parent.pid)
    for process in processes:
        os.kill(process.pid, 15)
    assert end(processes, 30.0) == 0
