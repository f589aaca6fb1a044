"""Engines of a replica with changing weights. An engine that starts after an update serves nothing until the next
update.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.refused_models.cluster_memory import ClusterMemory
from wingbeat.deployments.refused_models.remembering_engines import RememberingEngines
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.deployments.replica.engine_supervisor import Life
from wingbeat.deployments.rollouts.wire import OperationResult

logger = logging.getLogger(__name__)
UPDATED = b"wingbeat rollouts"
STEPS = ("start_update", "start_head_update", "update_weights", "finish_update")
"""Operations that a trainer calls during an update; a call of any of them shows that the trainer is alive."""
SILENCE_S = 120.0
"""Seconds without a call during an update after which its trainer counts as gone and the update is abandoned."""


class _WatchedLife:
    """Lifetime of an engine that may have been loaded from older weights than the engines of other replicas use.

    Args:
        is_late: called once the engine is loaded; returns whether its weights are older than those of other replicas.
    """

    def __init__(self, life: Life, is_late: Callable[[], Awaitable[bool]]) -> None:
        self._life, self._is_late = life, is_late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._life, name)

    async def start(self) -> None:
        """Start the engine, see `Life`. If its weights are older, the engine serves nothing until the next update."""
        await self._life.start()
        if await self._is_late():
            await self._life.client.call("operate", "lose_weights", ())
            self._life.client.hold()
            logger.warning(
                "an engine has started with weights from before an update: it serves nothing until the next update"
            )


class ReplicaRollouts(RememberingEngines):
    """Engines of one replica that operators pause and update."""

    def __init__(self, config: AppConfig, memory: ClusterMemory, new_life: Callable[[AppConfig, str], Life]) -> None:
        super().__init__(config, memory, new_life)
        self._updated = False
        self._silence: asyncio.TimerHandle | None = None
        self._abandoning: asyncio.Task[OperationResult] | None = None

    async def _is_late(self) -> bool:
        self._updated = self._updated or bool(await self._memory.read(UPDATED))
        return self._updated

    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        """See `ReplicaEngines.operations`."""
        return {"rollouts": self.run, "weights": self.card, "inspect_weights": self.inspect}

    async def card(self) -> dict[str, Any]:
        """Return a description of the served weights; see `GET /v1/weights`."""
        weights = self.engines.client.weights
        return {"weights": weights or None, "folder": None, "pushed_at": None, "state": "serves"}

    async def inspect(self, folder: str) -> tuple[None, str]:
        """Refuse a pushed folder of weights, always; returns (None, reason)."""
        return None, "rollouts is given, by which weights are updated in place"

    async def run(
        self, name: str, arguments: tuple[Any, ...] = (), tensors: Any = None, weights: str | None = None
    ) -> OperationResult:
        """Run an operation of a `RolloutEngine`.

        Args:
            tensors: for `update_weights` only, given instead of `arguments`: mapping from names to tensors, or a Ray
                reference to such a mapping.
            weights: digest of the weights that are served after `finish_update`.

        Raises:
            EngineFailed: the engine is gone.
        """
        client = self.engines.client
        if tensors is None:
            told = await client.call("operate", name, arguments)
        else:
            told = await self._with_tensors(name, tensors)
        (client.release if told.serves else client.hold)()
        self._watch(name, told)
        if name == "finish_update" and told.refused is told.conflict is None and not told.value.of_head:
            client.renew(weights or "")
            self._updated = weights != ""
            await self._memory.write(UPDATED, "updated" if self._updated else "")
        return told

    async def _with_tensors(self, name: str, tensors: Any) -> OperationResult:
        from ray.exceptions import RayError

        from wingbeat.deployments.replica.drafters.supervisor import root_cause
        from wingbeat.runtime.rollouts.shared_tensors import shared_file

        if hasattr(tensors, "__await__"):
            try:
                async with asyncio.timeout(SILENCE_S):
                    tensors = await tensors
            except (RayError, TimeoutError) as error:
                return await self._refused(f"tensors cannot be fetched: {root_cause(error)}")
        if not isinstance(tensors, Mapping):
            return await self._refused(f"tensors must be given by name, and not as {type(tensors).__name__}")
        shared = shared_file(tensors)
        try:
            path = await asyncio.to_thread(shared.__enter__)
        except (TypeError, OSError) as error:
            return await self._refused(str(error))
        try:
            return await self.engines.client.call("operate", name, ({"files": [path]},))
        finally:
            shared.__exit__(None, None, None)

    async def _refused(self, reason: str) -> OperationResult:
        """Return a refusal with the engine's state."""
        told: OperationResult = await self.engines.client.call("operate", "is_paused", ())
        return told._replace(value=None, refused=reason)

    def _watch(self, name: str, told: OperationResult) -> None:
        """Start a timer that abandons the open update if the trainer makes no call for `SILENCE_S`."""
        if self._silence is not None and (name in STEPS or not told.is_open):
            self._silence.cancel()
            self._silence = None
        if self._silence is None and told.is_open:
            loop = asyncio.get_running_loop()
            self._silence = loop.call_later(SILENCE_S, lambda: self._abandon(loop))

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        logger.warning("No step of a weight update has come for %.0f s: the update is abandoned", SILENCE_S)
        self._abandoning = loop.create_task(self._try_abandon())

    async def _try_abandon(self) -> OperationResult:
        try:
            return await self.run("abandon_update")
        except EngineFailed as error:
            return OperationResult(conflict=str(error))

    def _launch(self) -> Life:
        return _WatchedLife(super()._launch(), self._is_late)
