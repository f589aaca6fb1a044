"""Calls to every engine at once, also for changes of names."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from wingbeat.deployments.fleet.catalog import NameChanges
from wingbeat.deployments.fleet.interface import EngineUnavailable

logger = logging.getLogger(__name__)


class EngineCall(Protocol):
    """Signature of `wingbeat.deployments.fleet.connection.PatientEngines.call`."""

    async def __call__(self, engine_id: str, name: str, *, works: bool = False, **arguments: Any) -> Any: ...


class EveryEngine:
    """Calls all engines that accept requests.

    Args:
        engine_ids: returns the ids of these engines.
    """

    def __init__(self, call: EngineCall, engine_ids: Callable[[], list[str]]) -> None:
        self.call = call
        self._engine_ids = engine_ids
        self._sharing: list[asyncio.Future] = []

    async def operate(self, operation: str, *arguments: Any, works: bool = False) -> list[Any]:
        """Calls one of `operations_of` on every engine; returns all answers.

        Args:
            works: whether the engine itself computes, which allows more time.

        Raises:
            EngineUnavailable: there is no engine, or an engine was lost before it answered.
        """
        calls = [self._operate(engine_id, operation, arguments, works) for engine_id in self._engine_ids()]
        if not calls:
            raise EngineUnavailable()
        try:
            return await asyncio.gather(*calls)
        except Exception as error:
            # The transport may raise anything for a lost engine; the log shows errors of our own code too.
            logger.warning("An engine has not answered %s", operation, exc_info=error)
            raise EngineUnavailable("An engine was lost before it answered.") from error

    async def operate_where_possible(self, operation: str, *arguments: Any) -> None:
        """Calls an operation on every engine; lost engines are ignored."""
        asked = {"operation": operation, "arguments": arguments}
        await asyncio.gather(*(self._try(engine_id, "operate", **asked) for engine_id in self._engine_ids()))

    async def tell(self, changes: NameChanges) -> None:
        """Sends changed names to every replica; a lost replica gets them when it is back."""
        await asyncio.gather(*(self._tell(one, changes) for one in self._engine_ids()))

    def share(self, engine_id: str, changes: NameChanges) -> None:
        """Sends changed names to a new replica in the background; a lost replica is ignored."""
        if changes:
            self._sharing.append(asyncio.ensure_future(self._tell(engine_id, changes)))
            self._sharing = [task for task in self._sharing if not task.done()]

    async def _operate(self, engine_id: str, operation: str, arguments: tuple, works: bool) -> Any:
        return await self.call(engine_id, "operate", works=works, operation=operation, arguments=arguments)

    async def _tell(self, engine_id: str, changes: NameChanges) -> None:
        # The call returns after the engine has computed and stored the named things, which may take long.
        await self._try(engine_id, "tell", works=True, changes=changes)

    async def _try(self, engine_id: str, name: str, **arguments: Any) -> None:
        """Calls an engine; logs errors, because the engine may be lost."""
        try:
            await self.call(engine_id, name, **arguments)
        except Exception as error:
            # The transport may raise anything for a lost engine.
            logger.warning("Engine %s has not answered %s", engine_id, name, exc_info=error)
