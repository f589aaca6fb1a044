"""Messages that a drafter's process and actor return to their callers."""

from typing import NamedTuple

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.deployments.replica.actor_process import ActorProcess


class DrafterStatus(NamedTuple):
    """State of a drafter, as its actor reports it."""

    process: ActorProcess
    """Process of the drafter's actor; the drafter's own process ends with this process."""
    channels: tuple[ChannelName, ...]
    silent_s: float
    """Seconds since the drafter's thread last checked whether a round is pending."""
