"""A drafter's process can be replaced in its actor, reports why it cannot load, and is forked if no device is used."""

import os
import signal
import subprocess
import sys

import pytest

from tests.fakes import wait_until
from wingbeat.cluster import fork_server
from wingbeat.cluster.channels.doorbell import PeerProcess, process_start
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.drafters.drafter_actor import DrafterActor, DrafterLost
from wingbeat.runtime.demo import demo_pair

KILL = os.kill
ASKING_NO_DEVICE = """
import torch

def asked(*arguments, **options):
    raise AssertionError("asked for a device")

for name in ("is_available", "device_count", "current_device", "_lazy_init"):
    setattr(torch.cuda, name, asked)
import wingbeat.deployments.replica.drafters.drafter_calls
"""


@pytest.fixture
def actor():
    made = DrafterActor(AppConfig(model=str(demo_pair().verifier), drafter=str(demo_pair().drafter)))
    yield made
    made.close()


@pytest.mark.slow
def test_a_killed_drafter_is_said_to_be_lost_and_the_next_one_answers(actor: DrafterActor):
    first = actor.drafter.pid  # nobody is told of a process that serves no channel yet
    assert actor.status().channels == ()
    os.kill(first, signal.SIGKILL)
    with pytest.raises(DrafterLost, match="has ended"):
        actor.status()
    actor.renew(None)
    assert actor.status().channels == ()
    assert actor.drafter.pid != first


@pytest.mark.slow
def test_a_drafter_that_cannot_be_loaded_answers_with_the_reason_whatever_is_asked(tmp_path):
    actor = DrafterActor(AppConfig(drafter=str(demo_pair().drafter), drafter_factory="tests.fakes:no_such_factory"))
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="no_such_factory"):
                actor.call("status")
    finally:
        actor.close()


@pytest.mark.slow
def test_what_drafters_are_forked_from_asks_no_device():
    done = subprocess.run([sys.executable, "-c", ASKING_NO_DEVICE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_drafter_that_does_not_answer_is_killed_and_its_late_answer_is_nobodys(actor: DrafterActor):
    assert actor.status().channels == ()
    actor._config = actor._config.model_copy(update={"drafter_start_timeout_s": 0.5})
    stuck = PeerProcess(actor.drafter.pid, process_start(actor.drafter.pid))
    os.kill(stuck.pid, signal.SIGSTOP)
    with pytest.raises(DrafterLost, match="has not answered status within"):
        actor.status()
    wait_until(lambda: not stuck.alive())
    actor._config = actor._config.model_copy(update={"drafter_start_timeout_s": 60.0})
    actor.renew(None)
    assert actor.status().channels == ()


@pytest.mark.slow
def test_under_mps_a_drafter_ends_by_itself_when_it_is_asked(actor: DrafterActor, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert actor.status().channels == ()
    killed = []
    monkeypatch.setattr(fork_server.os, "kill", lambda pid, number: killed.append(number) or KILL(pid, number))
    first = PeerProcess(actor.drafter.pid, process_start(actor.drafter.pid))
    monkeypatch.setattr(fork_server, "ASKED_S", 60.0)
    actor.renew(None)
    assert killed[0] == signal.SIGTERM
    assert not first.alive(), "it was waited for, and ended before it was killed"
    assert actor.status().channels == ()
