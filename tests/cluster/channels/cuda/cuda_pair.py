"""Channels through GPU memory, and a verifier and a drafter on one without a GPU."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.channels.cuda.fake_cuda import FakeCuda, FakeMachine
from tests.cluster.peers import DEVICE, LONG_S, SPEC
from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.cuda.cuda_runtime import CudaRuntime
from wingbeat.runtime.protocol.messages import ChannelSpec, TreeReply

ROUNDS_BEHIND = 30


class CudaChannels:
    """Channels through the memory of a fake GPU, which needs none, or of the real one.

    The drafter's GPU of the kind "fake-cuda-behind" takes time for each reply and hangs in the round after
    `ROUNDS_BEHIND`.
    """

    def __init__(self, kind: str) -> None:
        self._runtime = FakeCuda() if kind.startswith("fake-cuda") else CudaRuntime()
        self._behind = kind == "fake-cuda-behind"

    def create(self, name: str, spec: ChannelSpec) -> CudaIpcChannel:
        return CudaIpcChannel.create(name, spec, DEVICE, self._runtime)

    def attach(self, name: str, incarnation: int) -> Any:
        end = CudaIpcChannel.attach(name, incarnation, DEVICE, self._runtime)
        if not self._behind:
            return end
        return BehindEnd(end, self._runtime, lambda number: after(5e-3 if number <= ROUNDS_BEHIND else LONG_S))


def after(seconds: float) -> Callable[[], bool]:
    """A step of a stream that takes this long."""
    due: list[float] = []

    def step() -> bool:
        due.append(due[0] if due else time.monotonic() + seconds)
        return time.monotonic() >= due[0]

    return step


class BehindEnd:
    """A drafter's end whose replies reach the channel when the device comes to them.

    Args:
        step: a step of the device, for a round's number, after which the reply is complete.
    """

    def __init__(self, end: DrafterSide, cuda: FakeCuda, step: Callable[[int], Callable[[], bool]]) -> None:
        self._end, self._cuda, self._step = end, cuda, step
        self.reply = TreeReply(*(field.clone() for field in end._replies[0]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def wait_outcome(self, timeout_s: float) -> Any:
        """As `DrafterSide`; the device works meanwhile."""
        outcome, until = None, time.monotonic() + timeout_s
        while outcome is None and not self._end.closed and time.monotonic() < until:
            self._cuda.run()
            outcome = self._end.wait_outcome(1e-3)
        return outcome

    def publish_reply(self) -> None:
        """As `DrafterSide`; the header is the host's."""
        written, reply = [field.clone() for field in self.reply], self._end.reply
        reply.header.copy_(written[0])
        self._cuda.enqueue(self._step(self._end._polled))
        for into, field in zip(reply[1:], written[1:], strict=True):
            self._cuda.enqueue(lambda into=into, field=field: into.copy_(field) is not None)
        self._end.publish_reply()


class Pair:
    """A verifier and a drafter that are two CUDA processes on one machine, in this one."""

    def __init__(self, name: str, machine: FakeMachine) -> None:
        self.name, self.machine = name, machine
        self.verifier_cuda, self.drafter_cuda = FakeCuda(machine), FakeCuda(machine)
        self.channel = CudaIpcChannel.create(name, SPEC, DEVICE, self.verifier_cuda)
        self.verifier: VerifierSide = self.channel.verifier_end
        self.drafter = self.attach(1)

    def attach(self, incarnation: int) -> DrafterSide:
        self.drafter = CudaIpcChannel.attach(self.name, incarnation, DEVICE, self.drafter_cuda)
        return self.drafter

    def answer(self) -> None:
        assert self.drafter.poll_outcome() is not None
        self.drafter.publish_reply()

    def kill_drafter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.verifier, "_peer_process", _Dead)

    def kill_verifier(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.drafter, "_verifier", _Dead())


class _Dead:
    def works(self) -> bool:
        return False
