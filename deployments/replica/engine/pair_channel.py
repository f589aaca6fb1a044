"""The channel in which the engine's and the drafter's process of a configuration meet."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.cluster.channels.channel import DrafterSide, InProcessChannel, VerifierSide
from wingbeat.cluster.channels.header import ChannelError, ChannelName
from wingbeat.cluster.channels.segment import kind_of
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.cluster.placement import ChannelKind
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.parts import hooks
from wingbeat.runtime.protocol.messages import ChannelSpec

if TYPE_CHECKING:
    from wingbeat.runtime.inner_drafter import ChannelFactory

logger = logging.getLogger(__name__)
GPU_MEMORY: ChannelKind = "cuda_ipc"
OWN_DEVICE = torch.device("cuda", 0)
"""`wingbeat.cluster.placement.claim_devices` puts a process's own GPU first."""
TRIAL_WAIT_S = 0.05
"""Longest wait of one call for a drafter's marks."""


class PairChannel:
    """The verifier's side of whichever channel its pair has.

    Where `channel: auto` means GPU memory and that does not carry between the two processes, host memory takes over.

    Args:
        address: of this node, where the drafter comes over the network.
        runtime: of CUDA, for memory of a GPU; None takes torch's.

    Raises:
        ChannelError: it cannot be made; one line that names what is missing.
    """

    def __init__(
        self,
        config: AppConfig,
        name: str,
        spec: ChannelSpec,
        address: str | None = None,
        runtime: Any = None,
    ) -> None:
        self.problem: str | None = None
        """Why host memory has taken over; None where it has not."""
        self._said = False
        self._name, self._spec = name, spec
        self._may_fall_back = config.channel == "auto"
        self._in_gpu_memory = False
        self._channel: Any
        if address is not None:
            device = OWN_DEVICE if config.resolved_device() == "cuda" else None
            self._channel = hooks("network_channel")[0](address, spec, device)
        elif config.channel_kind() == GPU_MEMORY and (kind := self._device_channel()) is not None:
            try:
                self._channel = kind.create(name, spec, OWN_DEVICE, runtime)
                self._in_gpu_memory = True
            except ChannelError as error:
                if not self._may_fall_back:
                    raise
                self._channel = self._in_host_memory(str(error), said=not config.may_take_drafter_in())
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

    def try_drafter(self) -> bool:
        """See that a drafter which has attached is really reached; False where that is not seen yet.

        Streams wait meanwhile, which is why no call takes long. Raises ChannelError.
        """
        if self.problem is not None and not self._said:
            self._say()
        return not self._in_gpu_memory or self._channel.try_drafter(wait_s=TRIAL_WAIT_S)

    def _device_channel(self) -> Any:
        """The kind of channel through the memory of a GPU; None where the part is gone and host memory will do."""
        kind = next(iter(hooks("device_channel")), None)
        if kind is None and not self._may_fall_back:
            raise ChannelError(f"channel is {GPU_MEMORY}: nothing that is installed makes it; use auto or shm")
        return kind

    def fall_back(self, reason: str) -> ChannelName | None:
        """Have host memory take over, with one warning; None where this is no way out, and nothing has changed.

        Raises:
            ChannelError: /dev/shm is too small for it.
        """
        if not self._may_fall_back or not self._in_gpu_memory:
            return None
        self._channel.verifier_end.close()
        self._in_gpu_memory = False
        self._channel = self._in_host_memory(reason)
        return self._channel.name

    def _in_host_memory(self, reason: str, said: bool = True) -> ShmChannel:
        """Instead of GPU memory; `said` at once, or else once a drafter attaches, if one does."""
        self.problem = reason
        if said:
            self._say()
        return ShmChannel.create(f"{self._name}.host", self._spec)

    def _say(self) -> None:
        self._said = True
        logger.warning(
            "GPU memory does not carry rounds between the two processes: %s; host memory does, which costs each round "
            "a copy (channel shm says so without this line)",
            self.problem,
        )


def own_memory(config: AppConfig) -> "ChannelFactory":
    """Makes what a drafter within the engine's process meets it in: on the device, where both are on one."""
    on_gpu = config.resolved_device() == config.drafter_device() == "cuda"
    return partial(InProcessChannel, device=OWN_DEVICE if on_gpu else None)


def attach_channel(name: ChannelName, incarnation: int, on_gpu: bool) -> DrafterSide:
    """The drafter's side, of the kind that its verifier has made.

    Args:
        on_gpu: the drafter is on this process's own GPU.

    Raises:
        ChannelError: it cannot attach; one line that names what is missing.
    """
    if not isinstance(name, str):
        return hooks("network_channel")[0].attach(name, incarnation, OWN_DEVICE if on_gpu else None)
    if kind_of(name) == GPU_MEMORY:
        return hooks("device_channel")[0].attach(name, incarnation, OWN_DEVICE)
    return ShmChannel.attach(name, incarnation)
