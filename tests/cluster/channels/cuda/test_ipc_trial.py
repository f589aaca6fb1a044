"""The trial of CUDA IPC: another process really attaches, and whatever keeps it from that is one line."""

import sys

import pytest
import torch

from tests.cluster.channels.cuda.fake_cuda import FakeCuda, FakeMachine
from wingbeat.cluster.channels.cuda import ipc_trial
from wingbeat.cluster.channels.cuda.ipc_trial import try_cuda_ipc
from wingbeat.cluster.channels.header import ChannelError

DEVICE = torch.device("cuda", 0)
ON_A_FAKE = """
import sys
import torch
from tests.cluster.channels.cuda.fake_cuda import FakeCuda
from wingbeat.cluster.channels.cuda.ipc_trial import attach_until_input_ends
sys.exit(attach_until_input_ends(sys.argv[2], torch.device("cuda", int(sys.argv[3])), FakeCuda(fail=sys.argv[1])))
"""
"""The drafter's side of the trial, on a fake GPU that fails in the way of the first argument."""


def drafter(fail: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", ON_A_FAKE, fail)


def test_a_process_attaches_and_answers_and_nothing_is_left():
    machine = FakeMachine()
    try_cuda_ipc(DEVICE, DEVICE, FakeCuda(machine), drafter())
    assert machine.is_clean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        ("open_memory", "cannot open the verifier's .*: open_memory failed: out of memory"),
        ("shares_events", "shares no events between processes"),
        ("carry", "data written by the verifier do not arrive"),
    ],
)
def test_what_keeps_the_drafter_from_attaching_is_told(fail, reason):
    machine = FakeMachine()
    with pytest.raises(ChannelError, match=reason):
        try_cuda_ipc(DEVICE, DEVICE, FakeCuda(machine), drafter(fail))
    assert machine.is_clean()


def test_a_process_that_never_attaches_is_ended(monkeypatch):
    monkeypatch.setattr(ipc_trial, "ATTACHED_S", 0.5)
    with pytest.raises(ChannelError, match="no process has attached within"):
        try_cuda_ipc(DEVICE, DEVICE, FakeCuda(), (sys.executable, "-c", "import sys; sys.stdin.read()"))


@pytest.mark.slow
def test_a_process_that_holds_on_is_ended_too(monkeypatch):
    monkeypatch.setattr(ipc_trial, "LEFT_S", 0.5)
    stays = ON_A_FAKE.replace(
        "sys.exit(", "import time; ipc = __import__('sys'); ipc.stdin.read = lambda: time.sleep(60); ("
    )
    with pytest.raises(ChannelError, match="does not let go within"):
        try_cuda_ipc(DEVICE, DEVICE, FakeCuda(), (sys.executable, "-c", stays, ""))
