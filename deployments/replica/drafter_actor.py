"""The drafter's process: a Ray actor beside its verifier; what it does is `drafter_thread`'s.

Its replica names this class and needs nothing of torch, so that is imported only where the actor runs.
"""

import logging
import pickle
from typing import TYPE_CHECKING

from wingbeat.cluster.channels.remote_address import ChannelName
from wingbeat.cluster.placement import assigned_devices, claim_devices
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.replica.drafter_process import DrafterProcess

if TYPE_CHECKING:
    from wingbeat.runtime.drafters.base import DrafterNeeds

logger = logging.getLogger(__name__)


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

    def _needs(self, convention: bytes) -> "DrafterNeeds":
        return self._thread.needs(pickle.loads(convention))
