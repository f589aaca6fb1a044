"""The channel between the engine's process and the drafter's process."""

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
"""The GPU of this process, which `wingbeat.cluster.placement.claim_devices` makes the first device."""
TRIAL_WAIT_S = 0.05
"""Maximum seconds that one call of `try_drafter` waits for the data that proves that the channel works."""


class PairChannel:
    """The verifier's side of the pair's channel, of any kind.

    With the setting `channel: auto`, a channel in host memory is used if a channel in GPU memory does not work between
    the two processes.

    Args:
        address: address of this node if the drafter connects over the network; else None.
        runtime: CUDA runtime for channels in GPU memory; with None, torch's runtime is used.

    Raises:
        ChannelError: the channel cannot be created; the message is one line that names what is missing.
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
        """Why host memory is used instead of GPU memory; None if no change was made."""
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
        """Name of the channel, by which a drafter attaches."""
        return self._channel.name

    @property
    def verifier_end(self) -> VerifierSide:
        """The engine's end of the channel; `fall_back` replaces it."""
        return self._channel.verifier_end

    def try_drafter(self) -> bool:
        """Return True once test data of an attached drafter has arrived here, False if the data has not arrived yet.

        The call waits at most `TRIAL_WAIT_S`, because running requests wait meanwhile. Raises ChannelError if it is
        certain that data cannot arrive.
        """
        if self.problem is not None and not self._said:
            self._say()
        return not self._in_gpu_memory or self._channel.try_drafter(wait_s=TRIAL_WAIT_S)

    def _device_channel(self) -> Any:
        """Return the class of channels in GPU memory; None if the optional part with these channels is not installed
        and host memory is allowed.
        """
        kind = next(iter(hooks("device_channel")), None)
        if kind is None and not self._may_fall_back:
            raise ChannelError(f"channel is {GPU_MEMORY}: nothing that is installed makes it; use auto or shm")
        return kind

    def fall_back(self, reason: str) -> ChannelName | None:
        """Replace the channel in GPU memory by a channel in host memory, and log one warning.

        Returns the new channel's name. If the settings do not allow host memory, nothing is changed and None is
        returned.

        Raises:
            ChannelError: /dev/shm is too small.
        """
        if not self._may_fall_back or not self._in_gpu_memory:
            return None
        self._channel.verifier_end.close()
        self._in_gpu_memory = False
        self._channel = self._in_host_memory(reason)
        return self._channel.name

    def _in_host_memory(self, reason: str, said: bool = True) -> ShmChannel:
        """Create a channel in host memory instead of GPU memory.

        With `said` False, the warning is logged later, by `try_drafter`.
        """
        self.problem = reason
        if said:
            self._say()
        return ShmChannel.create(f"{self._name}.host", self._spec)

    def _say(self) -> None:
        self._said = True
        logger.warning(
            "GPU memory does not carry rounds between the two processes: %s; host memory is used, at the cost of a "
            "copy in each round (set channel to shm to avoid this warning)",
            self.problem,
        )


def own_memory(config: AppConfig) -> "ChannelFactory":
    """Return a factory of channels between an engine and a drafter in the same process.

    The channel is in GPU memory if both models are on the GPU.
    """
    on_gpu = config.resolved_device() == config.drafter_device() == "cuda"
    return partial(InProcessChannel, device=OWN_DEVICE if on_gpu else None)


def attach_channel(name: ChannelName, incarnation: int, on_gpu: bool) -> DrafterSide:
    """Return the drafter's side of a channel, of the same kind as the verifier's side.

    Args:
        on_gpu: whether the drafter runs on the GPU of this process.

    Raises:
        ChannelError: the channel cannot be attached; the message is one line that names what is missing.
    """
    if not isinstance(name, str):
        return hooks("network_channel")[0].attach(name, incarnation, OWN_DEVICE if on_gpu else None)
    if kind_of(name) == GPU_MEMORY:
        return hooks("device_channel")[0].attach(name, incarnation, OWN_DEVICE)
    return ShmChannel.attach(name, incarnation)
