"""The channel in which the engine's and the drafter's process of a configuration meet."""

import logging

import torch

from wingbeat.cluster.channels.channel import DrafterSide, VerifierSide
from wingbeat.cluster.channels.cuda_ipc import KIND as CUDA_IPC
from wingbeat.cluster.channels.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.cuda_runtime import CudaRuntime
from wingbeat.cluster.channels.header import ChannelError
from wingbeat.cluster.channels.segment import kind_of
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.cluster.channels.tcp.remote_address import ChannelName, RemoteAddress
from wingbeat.cluster.channels.tcp.remote_channel import RemoteChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.protocol.messages import ChannelSpec

logger = logging.getLogger(__name__)
OWN_DEVICE = torch.device("cuda", 0)
"""`wingbeat.cluster.placement.claim_devices` puts a process's own GPU first."""


class PairChannel:
    """The verifier's side of whichever channel its pair has.

    Where `channel: auto` means GPU memory and that does not carry between the two processes, host memory takes over.

    Args:
        address: of this node, where the drafter comes over the network.
        runtime: of CUDA; None takes torch's.

    Raises:
        ChannelError: it cannot be made; one line that names what is missing.
    """

    def __init__(
        self,
        config: AppConfig,
        name: str,
        spec: ChannelSpec,
        address: str | None = None,
        runtime: CudaRuntime | None = None,
    ) -> None:
        self._name, self._spec = name, spec
        self._may_fall_back = config.channel == "auto"
        self._channel: ShmChannel | CudaIpcChannel | RemoteChannel
        if address is not None:
            self._channel = RemoteChannel(address, spec, OWN_DEVICE if config.resolved_device() == "cuda" else None)
        elif config.channel_kind() == CUDA_IPC:
            try:
                self._channel = CudaIpcChannel.create(name, spec, OWN_DEVICE, runtime)
            except ChannelError as error:
                if not self._may_fall_back:
                    raise
                self._channel = self._in_host_memory(str(error))
        else:
            self._channel = ShmChannel.create(name, spec)

    @property
    def name(self) -> ChannelName:
        """Where a drafter is to attach."""
        return self._channel.name

    @property
    def verifier_end(self) -> VerifierSide:
        """The engine's end, until host memory takes over."""
        return self._channel.verifier_end

    def try_drafter(self) -> None:
        """See that a drafter which has attached is really reached. Raises ChannelError."""
        if isinstance(self._channel, CudaIpcChannel):
            self._channel.try_drafter()

    def fall_back(self, reason: str) -> ChannelName | None:
        """Have host memory take over, with one warning; None where this is no way out, and nothing has changed.

        Raises:
            ChannelError: /dev/shm is too small for it.
        """
        if not self._may_fall_back or not isinstance(self._channel, CudaIpcChannel):
            return None
        self._channel.verifier_end.close()
        self._channel = self._in_host_memory(reason)
        return self._channel.name

    def _in_host_memory(self, reason: str) -> ShmChannel:
        logger.warning(
            "GPU memory does not carry rounds between the two processes: %s; host memory does, which costs each round "
            "a copy (channel shm says so without this line)",
            reason,
        )
        return ShmChannel.create(f"{self._name}.host", self._spec)


def attach_channel(name: ChannelName, incarnation: int, on_gpu: bool) -> DrafterSide:
    """The drafter's side, of the kind that its verifier has made.

    Args:
        on_gpu: the drafter is on this process's own GPU.

    Raises:
        ChannelError: it cannot attach; one line that names what is missing.
    """
    if isinstance(name, RemoteAddress):
        return RemoteChannel.attach(name, incarnation, OWN_DEVICE if on_gpu else None)
    if kind_of(name) == CUDA_IPC:
        return CudaIpcChannel.attach(name, incarnation, OWN_DEVICE)
    return ShmChannel.attach(name, incarnation)
