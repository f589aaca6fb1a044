"""A router's way to all engines of a model at once: each does what is asked, or none."""

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.rollouts.wire import Finished, Told

logger = logging.getLogger(__name__)


class Refused(ValueError):
    """Refusal of what was sent; nothing was done. The line begins with a field, a tensor or a file."""


class Conflict(Exception):
    """Refusal of a step that cannot be taken now; one line."""


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

        An engine that has written fewer of them than others, or has begun anew, has missed some: it serves nothing
        until the next update.
        """
        written: dict[str, Finished] = await self._told({one: () for one in self._engine_ids()}, "num_written", {})
        lost, most = dict(self.lost), max(done.num_tensors for done in written.values())
        behind = {one: done for one, done in written.items() if done.num_tensors < most}
        lost |= {one: f"{done.num_tensors} of {most} tensors have arrived" for one, done in behind.items()}
        calls = {one: (version, keep_kv) for one in written.keys() - behind.keys()}
        await self._told(calls, "finish_update", {"weights": uuid.uuid4().hex})
        lost |= self.lost
        # The draft head of one that is behind stays as it is; its texts are right by any.
        name = "abandon_update" if any(done.of_head for done in written.values()) else "lose_weights"
        await asyncio.gather(*(self._ask(one, {"name": name, "arguments": ()}) for one in lost))
        self.lost = lost
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
        done = {one: answer.value for one, answer in found.items() if answer.refused is answer.conflict is None}
        for one, answer in found.items():
            if (reason := answer.refused or answer.conflict) is None:
                continue
            if done and not answer.serves:  # such as one that has begun anew: the others go on
                self.lost[one] = reason
            elif answer.refused is not None:
                raise Refused(reason)
            else:
                raise Conflict(reason)
        return done

    async def _ask(self, engine_id: str, arguments: dict[str, Any]) -> Told | str:
        """Answer of one engine; why there is none."""
        call = self._pool.every_engine.call
        try:
            return await call(engine_id, "ask", works=True, operation="rollouts", arguments=arguments)
        except Exception as error:  # whatever the transport raises for a replica that is gone
            logger.warning("Engine %s has not answered %s", engine_id, arguments["name"], exc_info=error)
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
