"""The drafter's process: a Ray actor beside its verifier, or of several; what it does is `drafter_thread`'s.

Its replica names this class and needs nothing of torch, so that is imported only where the actor runs.
"""

import logging
import os
import pickle
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.cluster.channels.remote_address import ChannelName
from wingbeat.cluster.placement import assigned_devices, claim_devices
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.replica.drafter_process import DrafterProcess

if TYPE_CHECKING:
    from wingbeat.runtime.drafters.base import DrafterNeeds

logger = logging.getLogger(__name__)


class Placed(NamedTuple):
    """The answer to a verifier that wants to share a drafter."""

    pid: int
    refusal: str | None = None
    """Why it has no place."""


class DrafterStatus(NamedTuple):
    """What a drafter says of itself."""

    process: DrafterProcess
    channels: tuple[ChannelName, ...]
    silent_s: float
    """How long ago its thread last looked for a round."""


class DrafterActor:
    """It is never restarted in place: a new actor under a new incarnation takes over the channel.

    Args:
        core: CPU core its thread shares with the verifier's; None leaves it free.
        convention: how to read a head whose files leave that open, where it is settled already: a pickled
            `HeadConvention` or None.

    Raises:
        Exception: whatever the drafter's factory raises, such as a checkpoint error that names the tensor.
    """

    def __init__(self, config: AppConfig, core: int | None = None, convention: bytes | None = None) -> None:
        show_log()
        if config.num_gpus_per_drafter > 0:
            claim_devices(assigned_devices())
        logger.info("loading the drafter %s", config.choice().label)
        from wingbeat.deployments.replica.drafter_thread import DrafterThread

        self._thread = DrafterThread(config, core)
        if convention is not None:
            self._needs(convention)

    def process(self) -> DrafterProcess:
        """This process, and where it runs."""
        return DrafterProcess.own()

    def needs(self, convention: bytes) -> bytes:
        """What this drafter needs of its verifier, pickled.

        Args:
            convention: how its head is to be read, pickled; None leaves it as its files say.

        Raises:
            ValueError: its head cannot be read so.
        """
        return pickle.dumps(self._needs(convention))

    def attach(self, name: ChannelName, incarnation: int) -> None:
        """Serve the channel `name` from now on.

        Raises:
            ChannelError: there is no such channel, a later incarnation holds it, or this GPU cannot reach its memory.
        """
        self._thread.attach(name, incarnation)

    def attach_shared(self, name: ChannelName, incarnation: int, convention: bytes | None) -> "Placed":
        """Serve one more channel, where there is room.

        Args:
            convention: as for `needs`; None where the verifier has none.

        Raises:
            ChannelError, ValueError: as `DrafterThread.attach`.
        """
        from wingbeat.runtime.drafters.draft_room import NoRoomError

        try:
            self._thread.attach(name, incarnation, None if convention is None else pickle.loads(convention))
        except NoRoomError as error:
            return Placed(os.getpid(), str(error))
        return Placed(os.getpid())

    def detach(self, name: ChannelName) -> None:
        """Serve a channel no more; harmless where it is not served."""
        self._thread.detach(name)

    def release_newest(self) -> None:
        """Let go of the verifier that came last: it looks for another place."""
        for name in self._thread.channels()[-1:]:
            logger.info("letting go of %s, another drafter has fewer verifiers", name)
            self._thread.detach(name)

    def status(self) -> "DrafterStatus":
        """Where it runs, whom it serves, and whether its thread does."""
        return DrafterStatus(DrafterProcess.own(), tuple(self._thread.channels()), self._thread.silent_s)

    def _needs(self, convention: bytes) -> "DrafterNeeds":
        return self._thread.needs(pickle.loads(convention))
