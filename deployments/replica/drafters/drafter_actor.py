"""The drafter's Ray actor, which serves one or several verifiers. The actor holds the GPU; its child process drafts.

Child processes are forked from a server process that has imported torch, so that the replacement of a dead drafter
takes less than a second.
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
"""Environment variables that make torch count devices through NVML. Otherwise torch counts them through CUDA, and a
process that has done so cannot fork children that use CUDA.
"""
RENEW_S = 10.0
"""Maximum seconds for an actor's `renew`. `renew` waits for nothing, so an actor that takes longer is stuck."""


class DrafterLost(RuntimeError):
    """The drafter's process has ended."""


class DrafterActor:
    """Actor of one drafter. Ray does not restart a lost actor; the verifier's replica starts a new actor.

    Args:
        core: CPU core that the drafter's thread shares with the verifier's thread; None does not pin the thread.
        terms: pickled `DrafterTerms` if the verifier has already sent them, else None.
    """

    serve = "wingbeat.deployments.replica.drafters.drafter_calls:serve"
    """Function that runs in the drafter's process."""

    def __init__(self, config: AppConfig, core: int | None = None, terms: bytes | None = None) -> None:
        show_log()
        if config.num_gpus_per_drafter > 0:
            claim_devices(assigned_devices())
        self._config, self._core = config, core
        self._server = ForkServer(self.serve, FORKED_ENV | waiting_env() | compiler_env())
        self.drafter: Forked | None = None
        """Child process that drafts."""
        self.renew(terms)

    def renew(self, terms: bytes | None) -> None:
        """Kill the current process, if any, and fork another one, which loads in the background.

        Raises:
            EOFError: no process can be forked.
        """
        if self.drafter is not None:
            if why := self._memory_kills.explain():
                logger.error("The drafter's process %d is replaced%s", self.drafter.pid, why)
            self.drafter.kill()
        self._memory_kills = MemoryKills()
        self.drafter = self._server.fork()
        # if the process has already ended, the next `call` raises DrafterLost
        with contextlib.suppress(ConnectionError):
            self.drafter.connection.send((self._config, self._core, terms))

    def call(self, name: str, *arguments: Any) -> Any:
        """Run a method of `DrafterCalls` in the drafter's process, once the drafter is loaded.

        Raises:
            DrafterLost: the process has ended, or was killed because it did not answer within drafter_start_timeout_s.
            Exception: whatever the method or the loading of the drafter raised.
        """
        patience_s = self._config.drafter_start_timeout_s
        try:
            self.drafter.connection.send((name, arguments))
            if not self.drafter.connection.poll(patience_s):
                pid = self.drafter.pid
                self.drafter.kill()  # a late answer must not be taken for the answer to the next call
                raise DrafterLost(f"the drafter's process {pid} has not answered {name} within {patience_s:.0f} s")
            answer, problem = self.drafter.connection.recv()
        except (EOFError, OSError):
            raise DrafterLost("the drafter's process has ended") from None
        if problem is not None:
            raise problem
        return answer

    def status(self) -> DrafterStatus:
        """Return the drafter's processes and channels, and the seconds since its thread last checked whether a round is
        pending.

        Raises the errors of `call`.
        """
        return DrafterStatus(ActorProcess.own(), *self.call("status"))

    def close(self) -> None:
        """End the child process. Outside of Ray this must be called; a Ray actor's children end with the actor."""
        self._server.close()


async def renewed(actor: ActorHandle, terms: bytes | None = None) -> bool:
    """Call `DrafterActor.renew`; returns False if the actor is gone or stuck."""
    try:
        await asyncio.wait_for(actor.renew.remote(terms), RENEW_S)
    except (RayError, TimeoutError):
        return False
    return True
