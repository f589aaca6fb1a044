"""Messages of a drafter's process and actor to their callers."""

from typing import NamedTuple

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.deployments.replica.actor_process import ActorProcess


class DrafterStatus(NamedTuple):
    """State of a drafter."""

    process: ActorProcess
    """Process of the drafter's actor; the drafter ends with it."""
    channels: tuple[ChannelName, ...]
    silent_s: float
    """Seconds since the drafter's thread last looked for a round."""
