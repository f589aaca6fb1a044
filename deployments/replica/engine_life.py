"""Lifetime of an engine in its replica, from the start of the engine's processes to their end.

These are the engine's own process, the processes of the other tensor-parallel ranks if the model is divided, and the
drafter's process if the drafter does not run in the engine's process.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

from wingbeat.cluster.channels.link import Link
from wingbeat.cluster.child_process import STACKS_SIGNAL, ChildProcess, is_stopped, threads_of
from wingbeat.cluster.cores import waiting_env
from wingbeat.cluster.memory_kills import MemoryKills
from wingbeat.deployments.fleet.catalog import Names
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.parts import first_result
from wingbeat.deployments.replica.drafters.supervisor import DrafterHandle, DrafterSupervisor
from wingbeat.deployments.replica.engine.engine_messages import EngineStart, EngineStarted
from wingbeat.deployments.replica.engine_client import EngineClient, EngineFailed
from wingbeat.deployments.replica.engine_watch import LOOK_S, EngineWatch
from wingbeat.kernels.disk_cache import compiler_env
from wingbeat.runtime.verifier_errors import BackendLost

logger = logging.getLogger(__name__)
MODULE = "wingbeat.deployments.replica.engine.engine_process"
STOP_S = 10.0
"""Seconds that a stopping process has to finish its running round and to close its files before it is killed."""
DEATH_S = 30.0
"""Maximum seconds to wait until the kernel has ended a killed process."""
STACKS_S = 1.0
"""Seconds that a stuck process has to write its stacks to the log before it is killed."""
MOST_NAMED = 8
"""Maximum number of requests that a log line names."""
OWN_WORDS_S = 3.0
"""Seconds that the engine has to report its own error after a rank has ended during the start."""


LaunchDrafter = Callable[[bytes | None], DrafterHandle]
"""Function that starts a drafter. Its argument is pickled `DrafterTerms`, or None if the verifier has not sent them
yet.
"""


class OtherRanks(Protocol):
    """The processes of ranks 1 and higher of a divided verifier; rank 0 is the engine's process."""

    group: Any
    """Rendezvous of the ranks; see `PairSettings.spread`."""
    pids: list[int]
    """Process ids of the ranks that have started."""

    async def lost(self) -> str:
        """Wait until a rank has ended; returns the reason."""
        ...

    def kill(self) -> None:
        """Kill all ranks without waiting."""
        ...


class EngineLife:
    """Starts an engine and its drafter once, and ends both once. The object must be created on the event loop that uses
    it.

    Args:
        start: parameters of the engine's process.
        launch_drafter: starts a drafter; None if the engine has no drafter, or if the drafter runs in the engine's
            process.
        launch_ranks: starts the other ranks; None if the engine's process holds the whole model.
        names: named objects that the engine shall hold; objects that the engine finds on disk are added to them.
        is_first: whether no other engine has run in this replica.
    """

    def __init__(
        self,
        start: EngineStart,
        launch_drafter: LaunchDrafter | None,
        launch_ranks: Callable[[], OtherRanks] | None = None,
        names: Names | None = None,
        is_first: bool = True,
    ) -> None:
        self.info: ModelInfo | None = None
        self.self_test: dict[str, Any] | None = None
        self.supervisor: DrafterSupervisor | None = None
        self._drafter: DrafterHandle | None = None
        self.ranks = None if launch_ranks is None else launch_ranks()
        self._start = start if self.ranks is None else start._replace(spread=self.ranks.group)
        self._names = Names() if names is None else names
        self._launch_drafter = launch_drafter
        self._engine_watch = EngineWatch(start.config.stuck_after_s(), is_first)
        # The drafter is launched first, so that it loads while the engine's process loads the model.
        if launch_drafter is not None:
            self._drafter = launch_drafter(None)
        self._memory_kills = MemoryKills()
        link = Link.create()
        try:
            # Ray sets OMP_NUM_THREADS of its workers from their reserved CPUs, but the engine computes its own number
            # of threads.
            env = {"OMP_NUM_THREADS": str(start.config.num_threads() or 1), **waiting_env(), **compiler_env()}
            self._process = ChildProcess(MODULE, link.child_fds, env)
        # Any error is caught here, because otherwise the processes launched above would never be ended.
        except BaseException:
            link.close()
            self._end_others()
            raise
        self.client = EngineClient(link, None if self._drafter is None else self._drafter.needs, start.weights)
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._watching_ranks = asyncio.get_running_loop().create_task(self._watch_ranks())
        self._guarding: asyncio.Task[None] | None = None
        self._supervising: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the engine and the drafter, and run the drafter's self-test.

        Raises:
            Exception: the error that prevented the start of engine or drafter; the message is one line that names what
                to change.
        """
        limit_s = self._start.config.engine_start_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._load()
        except TimeoutError:
            if not limit.expired():
                raise
            reason = f"the engine has not started within {limit_s:.0f} s (engine_start_timeout_s)"
            await self._end_stuck(reason)
            raise EngineFailed(reason) from None
        self._guarding = asyncio.get_running_loop().create_task(self._guard())

    async def _load(self) -> None:
        config = self._start.config
        logger.info("loading the model %s (%s)", config.model_name(), config.shown_load())
        try:
            started = await self.client.start(self._start)
        except BackendLost:
            # The engine's error states only that a rank is lost; `_watch_ranks` determines which rank, and why.
            await asyncio.wait([self._watching_ranks], timeout=2 * OWN_WORDS_S)
            self.client.check_alive()
            raise
        self.info = started.info
        if self._drafter is not None and started.channel_name is not None:
            await self._start_drafter(started)
        elif config.drafts_in_engine() and started.checks_drafter:
            await self._try_drafter()
        # These calls come after the drafter's self-test, so that neither the named objects nor the recording contain
        # data of the test.
        for kind, catalog in self._names.catalogs.items():
            catalog.merge(await self.client.call("open_names", kind, catalog.changes()))
        await self.client.call("observe")

    @property
    def drafter_place(self) -> str | None:
        """The effective value of the setting drafter_place; None if there is no drafter."""
        config = self._start.config
        if not config.has_drafter():
            return None
        taken_in = self.supervisor is not None and self.supervisor.taken_in
        return "engine" if taken_in else config.drafter_place

    def channel_of(self, meant: str | None) -> str | None:
        """Return the kind of channel that carries rounds; None if the drafter runs in the engine's process.

        Args:
            meant: kind of channel that the settings select. The channel is of this kind unless the pair has fallen back
                to host memory.
        """
        if self.drafter_place == "engine":
            return None
        return "shm" if self.supervisor is not None and self.supervisor.fell_back else meant

    async def end(self) -> None:
        """End the engine's process, the ranks and the drafter; a second call does nothing."""
        for task in (self._supervising, self._guarding):
            if task is not None:
                task.cancel()
        self.client.stop()
        await asyncio.wait([self._watching], timeout=STOP_S)
        self._process.kill()
        await asyncio.wait([self._watching], timeout=DEATH_S)
        if not self._watching.done():
            # A device driver may keep the killed process in the kernel. This method goes on all the same, because
            # nothing here depends on the process any more.
            logger.error("The engine's process %d does not end, though it was killed", self._process.pid)
            self._watching.cancel()
            self.client.lose("its process does not end")
        self._watching_ranks.cancel()
        self._end_others()

    def _end_others(self) -> None:
        if self.ranks is not None:
            self.ranks.kill()
        if self.supervisor is not None:
            self.supervisor.stop()
        elif self._drafter is not None:
            self._drafter.kill()
            self._drafter = None

    async def _watch(self) -> None:
        """Wait until the engine's process has ended, for whatever cause, then report the engine as lost."""
        code = await self._process.wait()
        how = f"signal {-code} ended it" if code < 0 else f"it ended with code {code}"
        if code == -signal.SIGKILL:
            how += self._memory_kills.explain()
        self.client.lose(f"the engine's process {self._process.pid} is gone: {how}")

    async def _guard(self) -> None:
        """End the engine if it is stuck. `_watch` does not notice a stuck engine, because its process is still
        alive.
        """
        while self.client.failure is None:
            await asyncio.sleep(LOOK_S)
            if self.client.failure is not None:
                return
            if (found := self.client.look(self._engine_watch, time.monotonic())).stuck is not None:
                await self._end_stuck(f"the engine's process {self._process.pid} was {found.stuck}, and was killed")

    async def _end_stuck(self, reason: str) -> None:
        """Log the stacks of the engine's process and kill it; the requests that the engine was working on become
        suspects.
        """
        if self.client.failure is not None:
            return
        # If the process was stopped by a signal (SIGSTOP), no request is the cause, so there are no suspects.
        suspects = [] if is_stopped(self._process.pid) else self.client.at_work_for()
        logger.error("%s; it was working for the requests %s", reason, ", ".join(suspects[:MOST_NAMED]) or "(none)")
        logger.error("its threads, then their stacks: %s", "; ".join(threads_of(self._process.pid)))
        self._process.signal(STACKS_SIGNAL)
        await asyncio.sleep(STACKS_S)
        self._process.kill()
        self.client.lose(reason, suspects)

    async def _watch_ranks(self) -> None:
        """End the engine when a rank has ended, because the engine cannot run a round without that rank."""
        if self.ranks is None:
            return
        reason = await self.ranks.lost()
        logger.error("%s", reason)
        if self.info is not None:
            self.client.stop()  # the engine gives running requests back, unless it has already noticed the loss itself
            await asyncio.wait([self._watching], timeout=STOP_S)
            self._process.kill()  # a captured round would wait for ever for the GPU, which waits for the lost rank
            self.client.lose(reason)
            return
        await asyncio.sleep(OWN_WORDS_S)
        self.client.lose(reason)

    async def _start_drafter(self, started: EngineStarted) -> None:
        launch, terms, config = self._launch_drafter, self._drafter.terms, self._start.config
        supervisor = first_result("drafter_supervisor", config, started) or DrafterSupervisor
        self.supervisor = supervisor(
            self.client.call, started.channel_name, lambda: launch(terms), config.drafter_back_off_s
        )
        patience_s, checks = getattr(self._drafter, "patience_s", None), started.checks_drafter
        try:
            async with asyncio.timeout(patience_s):
                await self.supervisor.start(self._drafter)
        except TimeoutError:
            logger.warning(
                "no drafter of the pool has attached within %.0f s: serving without one until one attaches", patience_s
            )
            checks = False
        if checks:
            await self._try_drafter()
        self._supervising = asyncio.get_running_loop().create_task(self.supervisor.run())

    async def _try_drafter(self) -> None:
        config = self._start.config
        logger.info("trying the drafter %s of %s on short texts", config.choice().label, config.model_name())
        self.self_test = await self.client.call("check_drafter")
