"""What a drafter's process and its actor are told, and tell those that use them."""

from typing import NamedTuple

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.deployments.replica.actor_process import ActorProcess


class DrafterStatus(NamedTuple):
    """What a drafter says of itself."""

    process: ActorProcess
    """Of its actor, with which it ends."""
    channels: tuple[ChannelName, ...]
    silent_s: float
    """How long ago its thread last looked for a round."""
