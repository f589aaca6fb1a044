"""The channel between the engine's process and the drafter's process."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.cluster.channels.channel import DrafterSide, InProcessChannel, VerifierSide
from wingbeat.cluster.channels.header import ChannelError, ChannelName
from wingbeat.cluster.channels.segment import kind_of
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.cluster.placement import ChannelKind
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.parts import first_result, hooks
from wingbeat.runtime.protocol.messages import ChannelSpec

if TYPE_CHECKING:
    from wingbeat.runtime.inner_drafter import ChannelFactory

GPU_MEMORY: ChannelKind = "cuda_ipc"
OWN_DEVICE = torch.device("cuda", 0)
"""The GPU of this process, which `wingbeat.cluster.placement.claim_devices` makes the first device."""


class PairChannel:
    """The verifier's side of the pair's channel.

    Args:
        channel: object with `name` and `verifier_end`.
    """

    problem: str | None = None
    """Why host memory is used instead of GPU memory; None if no change was made."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    @property
    def name(self) -> ChannelName:
        """Name of the channel, by which a drafter attaches."""
        return self._channel.name

    @property
    def verifier_end(self) -> VerifierSide:
        """The engine's end of the channel; `fall_back` may replace it."""
        return self._channel.verifier_end

    def try_drafter(self) -> bool:
        """Return True once test data of an attached drafter has arrived here, False if the data has not arrived yet.

        Raises ChannelError if it is certain that data cannot arrive.
        """
        return True

    def fall_back(self, reason: str) -> ChannelName | None:
        """Replace a channel that does not work by a channel in host memory; returns the new channel's name. If that is
        not possible, nothing is changed and None is returned.

        Raises:
            ChannelError: /dev/shm is too small.
        """
        return None


def open_channel(config: AppConfig, name: str, spec: ChannelSpec, address: str | None = None) -> PairChannel:
    """Create the pair's channel.

    Args:
        address: address of this node if the drafter connects over the network; else None.

    Raises:
        ChannelError: the channel cannot be created; the message is one line that names what is missing.
    """
    channel = first_result("pair_channel", config, name, spec, address)
    if channel is None and config.channel == GPU_MEMORY:
        raise ChannelError(f"channel is {GPU_MEMORY}: nothing that is installed makes it; use auto or shm")
    return channel or PairChannel(ShmChannel.create(name, spec))


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
