"""The channel in which the engine's and the drafter's process of a configuration meet."""

import torch

from wingbeat.cluster.channels.channel import DrafterSide
from wingbeat.cluster.channels.cuda_ipc import CudaIpcChannel
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.cluster.channels.tcp.remote_address import ChannelName, RemoteAddress
from wingbeat.cluster.channels.tcp.remote_channel import RemoteChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.protocol.messages import ChannelSpec

OWN_DEVICE = torch.device("cuda", 0)
"""`wingbeat.cluster.placement.claim_devices` puts a process's own GPU first."""


def create_channel(
    config: AppConfig, name: str, spec: ChannelSpec, address: str | None = None
) -> ShmChannel | CudaIpcChannel | RemoteChannel:
    """The verifier's side. Raises ChannelError; one line that names what is missing.

    Args:
        address: of this node, where the drafter comes over the network.
    """
    if address is not None:
        return RemoteChannel(address, spec, OWN_DEVICE if config.resolved_device() == "cuda" else None)
    if config.channel_kind() == "cuda_ipc":
        return CudaIpcChannel.create(name, spec, OWN_DEVICE)
    return ShmChannel.create(name, spec)


def attach_channel(config: AppConfig, name: ChannelName, incarnation: int) -> DrafterSide:
    """The drafter's side. Raises ChannelError; one line that names what is missing."""
    if isinstance(name, RemoteAddress):
        return RemoteChannel.attach(name, incarnation, OWN_DEVICE if config.drafter_device() == "cuda" else None)
    if config.channel_kind() == "cuda_ipc":
        return CudaIpcChannel.attach(name, incarnation, OWN_DEVICE)
    return ShmChannel.attach(name, incarnation)
