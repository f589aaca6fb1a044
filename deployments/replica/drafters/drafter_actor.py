"""The drafter's actor, beside its verifier or for several: it holds the GPU, and a process of its own drafts.

The next process is forked from one that has imported torch, so a drafter that dies is replaced within a second.
"""

import asyncio
import contextlib
import logging
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from wingbeat.cluster.cores import waiting_env
from wingbeat.cluster.fork_server import Forked, ForkServer
from wingbeat.cluster.memory_kills import MemoryKills
from wingbeat.cluster.placement import assigned_devices, claim_devices
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import show_log
from wingbeat.deployments.replica.actor_process import ActorProcess
from wingbeat.deployments.replica.drafters.drafter_messages import DrafterStatus
from wingbeat.kernels.disk_cache import compiler_env

logger = logging.getLogger(__name__)
FORKED_ENV = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""A process that has asked CUDA for its devices cannot be forked into one that uses them; by NVML it may ask."""
RENEW_S = 10.0
"""What an actor has to begin another process: it waits for nothing, so that one that takes longer is stuck."""


class DrafterLost(RuntimeError):
    """The drafter's process has ended."""


class DrafterActor:
    """One drafter; never restarted in place by Ray: a new actor takes over where this one is gone.

    Args:
        core: CPU core its thread shares with the verifier's; None leaves it free.
        terms: pickled `DrafterTerms`, where they are settled already.
    """

    serve = "wingbeat.deployments.replica.drafters.drafter_calls:serve"
    """Runs in the drafter's process."""

    def __init__(self, config: AppConfig, core: int | None = None, terms: bytes | None = None) -> None:
        show_log()
        if config.num_gpus_per_drafter > 0:
            claim_devices(assigned_devices())
        self._config, self._core = config, core
        self._server = ForkServer(self.serve, FORKED_ENV | waiting_env() | compiler_env())
        self.drafter: Forked | None = None
        """The process that drafts."""
        self.renew(terms)

    def renew(self, terms: bytes | None) -> None:
        """End the process there is, and begin another one, which loads while the caller goes on.

        Raises:
            EOFError: no process can be had.
        """
        if self.drafter is not None:
            if why := self._memory_kills.explain():
                logger.error("The drafter's process %d is replaced%s", self.drafter.pid, why)
            self.drafter.kill()
        self._memory_kills = MemoryKills()
        self.drafter = self._server.fork()
        with contextlib.suppress(ConnectionError):  # it has ended at once: the next call says so
            self.drafter.connection.send((self._config, self._core, terms))

    def call(self, name: str, *arguments: Any) -> Any:
        """Run a method of `DrafterCalls`, once the drafter is loaded.

        Raises:
            DrafterLost: its process has ended, or has not answered in time and was killed.
            Exception: the method's, or why the drafter cannot be loaded.
        """
        patience_s = self._config.drafter_start_timeout_s
        try:
            self.drafter.connection.send((name, arguments))
            if not self.drafter.connection.poll(patience_s):
                pid = self.drafter.pid
                self.drafter.kill()  # an answer to this call must not be taken for one to the next
                raise DrafterLost(f"the drafter's process {pid} has not answered {name} within {patience_s:.0f} s")
            answer, problem = self.drafter.connection.recv()
        except (EOFError, OSError):
            raise DrafterLost("the drafter's process has ended") from None
        if problem is not None:
            raise problem
        return answer

    def status(self) -> DrafterStatus:
        """Where it runs, whom it serves, and whether its thread does; raises as `call`."""
        return DrafterStatus(ActorProcess.own(), *self.call("status"))

    def close(self) -> None:
        """End its process, where this is no actor that ends with all it has."""
        self._server.close()


async def renewed(actor: ActorHandle, terms: bytes | None = None) -> bool:
    """Whether a `DrafterActor` has begun another process; not where it is gone or stuck itself."""
    try:
        await asyncio.wait_for(actor.renew.remote(terms), RENEW_S)
    except (RayError, TimeoutError):
        return False
    return True
