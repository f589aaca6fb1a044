"""A router's operations on all engines of a model at once. If an engine refuses an operation, the operation fails;
engines that give no answer are recorded as lost.
"""

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.rollouts.wire import Finished, OperationResult

logger = logging.getLogger(__name__)


class Refused(ValueError):
    """The data that the caller sent cannot be used, and nothing was changed. The message is one line that begins with
    the name of a field, a tensor or a file.
    """


class Conflict(Exception):
    """The operation is not possible now; the message is one line that gives the reason."""


class FleetRollouts:
    """Operations on every engine of a model.

    Args:
        pool: pool of the model's engines.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.lost: dict[str, str] = {}
        """For each engine that failed to execute the last operation, the reason. These engines serve nothing until
        their next update.
        """

    @property
    def num_engines(self) -> int:
        """Number of the model's engines, including engines that accept no requests."""
        return len(self._pool.engine_ids)

    async def ask(self, name: str, *arguments: Any, **more: Any) -> Any:
        """Run an operation of `RolloutEngine` on every engine; returns the first engine's answer.

        Args:
            more: further arguments of `ReplicaRollouts.run`.

        Raises:
            Refused, Conflict: an engine refuses the operation.
            EngineUnavailable: no engine answers.
        """
        return next(iter((await self._told({one: arguments for one in self._engine_ids()}, name, more)).values()))

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Have every engine join a trainer's process group, each engine with a different index.

        Raises the errors of `ask`.
        """
        calls = {one: (dict(info), index) for index, one in enumerate(self._engine_ids())}
        await self._told(calls, "init_transfer", {})

    async def finish_update(self, version: str | None, keep_kv: bool, of_checkpoint: bool = False) -> Finished:
        """Serve the new weights on all engines; returns the answer of an engine that has all tensors.

        An engine that has written fewer tensors than another engine, or has restarted during the update, lacks tensors;
        it serves nothing until the next update. Raises the errors of `ask`.

        Args:
            of_checkpoint: whether the new weights are the weights with which an engine starts.
        """
        written: dict[str, Finished] = await self._told({one: () for one in self._engine_ids()}, "num_written", {})
        lost, most = dict(self.lost), max(done.num_tensors for done in written.values())
        behind = {one: done for one, done in written.items() if done.num_tensors < most}
        lost |= {one: f"{done.num_tensors} of {most} tensors have arrived" for one, done in behind.items()}
        calls = {one: (version, keep_kv) for one in written.keys() - behind.keys()}
        told = await self._told(calls, "finish_update", {"weights": "" if of_checkpoint else uuid.uuid4().hex})
        lost |= self.lost
        # In an update of the draft head, an engine that lacks tensors keeps its old head and goes on serving, because
        # the draft head does not affect the generated texts.
        name = "abandon_update" if any(done.of_head for done in written.values()) else "lose_weights"
        await asyncio.gather(*(self._ask(one, {"name": name, "arguments": ()}) for one in lost))
        self.lost = lost
        return next(iter(told.values()))

    def _engine_ids(self) -> list[str]:
        found = sorted(self._pool.engine_ids)
        if not found:
            raise EngineUnavailable()
        return found

    async def _told(
        self, arguments: Mapping[str, tuple[Any, ...]], name: str, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run an operation on all engines; returns, by engine id, the answers of the engines that executed the
        operation.
        """
        calls = (self._ask(one, {"name": name, "arguments": given, **more}) for one, given in arguments.items())
        told = dict(zip(arguments, await asyncio.gather(*calls), strict=True))
        found = {one: answer for one, answer in told.items() if isinstance(answer, OperationResult)}
        self.lost = {one: answer for one, answer in told.items() if isinstance(answer, str)}
        if not found:
            raise EngineUnavailable("; ".join(f"engine {one}: {why}" for one, why in self.lost.items()))
        done = {one: answer.value for one, answer in found.items() if answer.refused is answer.conflict is None}
        for one, answer in found.items():
            if (reason := answer.refused or answer.conflict) is None:
                continue
            # An engine without valid weights, for example after a restart, does not stop the other engines.
            if done and not answer.serves:
                self.lost[one] = reason
            elif answer.refused is not None:
                raise Refused(reason)
            else:
                raise Conflict(reason)
        return done

    async def _ask(self, engine_id: str, arguments: dict[str, Any]) -> OperationResult | str:
        """Return the answer of one engine, or the reason why it gave no answer."""
        call = self._pool.every_engine.call
        try:
            return await call(engine_id, "ask", works=True, operation="rollouts", arguments=arguments)
        # any exception is caught, because the transport may raise any if the replica is gone
        except Exception as error:
            logger.warning("Engine %s has not answered %s", engine_id, arguments["name"], exc_info=error)
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
