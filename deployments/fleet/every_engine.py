"""Calls to every engine at once, for operations and for changes of names."""

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
        engine_ids: returns the ids of the engines that accept requests.
    """

    def __init__(self, call: EngineCall, engine_ids: Callable[[], list[str]]) -> None:
        self.call = call
        self._engine_ids = engine_ids
        self._sharing: list[asyncio.Future] = []

    async def operate(self, operation: str, *arguments: Any, works: bool = False) -> list[Any]:
        """Calls an operation of `operations_of` on every engine; returns the answers of all engines.

        Args:
            works: whether the engine itself handles the operation. The time limit is then higher.

        Raises:
            EngineUnavailable: there is no engine, or an engine was lost before its answer.
        """
        calls = [self._operate(engine_id, operation, arguments, works) for engine_id in self._engine_ids()]
        if not calls:
            raise EngineUnavailable()
        try:
            return await asyncio.gather(*calls)
        except Exception as error:
            # For a lost engine the transport may raise any exception, so all are caught. Errors are logged, because an
            # error may also come from a fault in Wingbeat's own code.
            logger.warning("An engine has not answered %s", operation, exc_info=error)
            raise EngineUnavailable("An engine was lost before it answered.") from error

    async def operate_where_possible(self, operation: str, *arguments: Any) -> None:
        """Calls an operation on every engine; lost engines are ignored."""
        asked = {"operation": operation, "arguments": arguments}
        await asyncio.gather(*(self._try(engine_id, "operate", **asked) for engine_id in self._engine_ids()))

    async def tell(self, changes: NameChanges) -> None:
        """Sends changed names to every replica; an unreachable replica gets the names when this router has connected to
        it again.
        """
        await asyncio.gather(*(self._tell(one, changes) for one in self._engine_ids()))

    def share(self, engine_id: str, changes: NameChanges) -> None:
        """Sends changed names to a new replica in the background; if the replica is lost, nothing happens."""
        if changes:
            self._sharing.append(asyncio.ensure_future(self._tell(engine_id, changes)))
            self._sharing = [task for task in self._sharing if not task.done()]

    async def _operate(self, engine_id: str, operation: str, arguments: tuple, works: bool) -> Any:
        return await self.call(engine_id, "operate", works=works, operation=operation, arguments=arguments)

    async def _tell(self, engine_id: str, changes: NameChanges) -> None:
        # The call runs in the background, because it returns only after the engine has computed and stored the named
        # things.
        await self._try(engine_id, "tell", works=True, changes=changes)

    async def _try(self, engine_id: str, name: str, **arguments: Any) -> None:
        """Calls an engine; errors are logged and not raised, because the engine may be lost."""
        try:
            await self.call(engine_id, name, **arguments)
        except Exception as error:
            # For a lost engine the transport may raise any exception.
            logger.warning("Engine %s has not answered %s", engine_id, name, exc_info=error)
