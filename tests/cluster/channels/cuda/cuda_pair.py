"""Channels through GPU memory, and a verifier and a drafter on one without a GPU."""

import pytest

from tests.cluster.channels.cuda.fake_cuda import FakeCuda, FakeMachine
from tests.cluster.peers import DEVICE, SPEC
from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.cluster.channels.cuda.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.cuda.cuda_runtime import CudaRuntime
from wingbeat.runtime.protocol.messages import ChannelSpec


class CudaChannels:
    """Channels through the memory of a fake GPU, which needs none, or of the real one."""

    def __init__(self, kind: str) -> None:
        self._runtime = FakeCuda() if kind == "fake-cuda" else CudaRuntime()

    def create(self, name: str, spec: ChannelSpec) -> CudaIpcChannel:
        return CudaIpcChannel.create(name, spec, DEVICE, self._runtime)

    def attach(self, name: str, incarnation: int) -> DrafterSide:
        return CudaIpcChannel.attach(name, incarnation, DEVICE, self._runtime)


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
