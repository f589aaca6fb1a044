"""A router's way to all engines of a model at once: each does what is asked, or none."""

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.rollouts.wire import Told

logger = logging.getLogger(__name__)


class Refused(ValueError):
    """What was sent does not fit; nothing was done. One line that begins with a field, a tensor or a file."""


class Conflict(Exception):
    """It cannot be done now; one line."""


class FleetRollouts:
    """Operations on every engine of a model.

    Args:
        pool: of its engines.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.lost: dict[str, str] = {}
        """Engines that have not done what was asked last, and why: they serve nothing until their next update."""

    @property
    def num_engines(self) -> int:
        """Replicas, whether they take requests or not."""
        return len(self._pool.engine_ids)

    async def ask(self, name: str, *arguments: Any, **more: Any) -> Any:
        """An operation of `RolloutEngine`, of every engine; the answer of the first.

        Args:
            more: further arguments of `ReplicaRollouts.run`.

        Raises:
            Refused, Conflict: an engine says so.
            EngineUnavailable: none answers.
        """
        return next(iter((await self._told({one: arguments for one in self._engine_ids()}, name, more)).values()))

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Let every engine join a trainer's group, by its place among them; raises as `ask`."""
        calls = {one: (dict(info), index) for index, one in enumerate(self._engine_ids())}
        await self._told(calls, "init_transfer", {})

    async def finish_update(self, version: str | None, keep_kv: bool) -> int:
        """Serve the new weights everywhere; returns of how many tensors. Raises as `ask`.

        An engine that has written fewer of them than others has missed some, and waits for the next update.
        """
        calls = {one: () for one in self._engine_ids()}
        written = await self._told(calls, "num_written", {})
        most = max(written.values())
        behind = {one for one, count in written.items() if count < most}
        for one in behind:
            self.lost[one] = f"{written[one]} of {most} tensors have arrived"
            await self._told({one: ()}, "lose_weights", {})
        calls = {one: (version, keep_kv) for one in written if one not in behind}
        await self._told(calls, "finish_update", {"weights": uuid.uuid4().hex})
        return most

    def _engine_ids(self) -> list[str]:
        found = sorted(self._pool.engine_ids)
        if not found:
            raise EngineUnavailable()
        return found

    async def _told(
        self, arguments: Mapping[str, tuple[Any, ...]], name: str, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Answers by engine, of those that answer."""
        calls = (self._ask(one, {"name": name, "arguments": given, **more}) for one, given in arguments.items())
        told = dict(zip(arguments, await asyncio.gather(*calls), strict=True))
        found = {one: answer for one, answer in told.items() if isinstance(answer, Told)}
        self.lost = {one: answer for one, answer in told.items() if isinstance(answer, str)}
        if not found:
            raise EngineUnavailable("; ".join(f"engine {one}: {why}" for one, why in self.lost.items()))
        for answer in found.values():
            if answer.refused is not None:
                raise Refused(answer.refused)
        for answer in found.values():
            if answer.conflict is not None:
                raise Conflict(answer.conflict)
        return {one: answer.value for one, answer in found.items()}

    async def _ask(self, engine_id: str, arguments: dict[str, Any]) -> Told | str:
        """One engine's answer; why there is none."""
        call = self._pool.every_engine.call
        try:
            return await call(engine_id, "ask", works=True, operation="rollouts", arguments=arguments)
        except Exception as error:  # whatever the transport raises for a replica that is gone
            logger.warning("Engine %s has not answered %s", engine_id, arguments["name"], exc_info=error)
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
