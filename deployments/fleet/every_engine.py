"""What is asked of every engine at once, and how names are changed in all of them."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from wingbeat.deployments.fleet.catalog import NameChanges
from wingbeat.deployments.fleet.interface import EngineUnavailable

logger = logging.getLogger(__name__)


class EngineCall(Protocol):
    """`wingbeat.deployments.fleet.connection.PatientEngines.call`."""

    async def __call__(self, engine_id: str, name: str, *, works: bool = False, **arguments: Any) -> Any: ...


class EveryEngine:
    """The engines that take requests.

    Args:
        engine_ids: of those.
    """

    def __init__(self, call: EngineCall, engine_ids: Callable[[], list[str]]) -> None:
        self.call = call
        self._engine_ids = engine_ids
        self._sharing: list[asyncio.Future] = []

    async def operate(self, operation: str, *arguments: Any, works: bool = False) -> list[Any]:
        """Every engine's answer to one of `operations_of`.

        Args:
            works: whether an engine may take its time for it.

        Raises:
            EngineUnavailable: there is no engine, or one is gone before it answered.
        """
        calls = [self._operate(engine_id, operation, arguments, works) for engine_id in self._engine_ids()]
        if not calls:
            raise EngineUnavailable()
        try:
            return await asyncio.gather(*calls)
        except Exception as error:
            # Of any kind: whatever the transport raises for an engine that is gone; a mistake of ours is in the log.
            logger.warning("An engine has not answered %s", operation, exc_info=error)
            raise EngineUnavailable("An engine was lost before it answered.") from error

    async def operate_where_possible(self, operation: str, *arguments: Any) -> None:
        """Have every engine do something; one that is gone has nothing to do."""
        asked = {"operation": operation, "arguments": arguments}
        await asyncio.gather(*(self._try(engine_id, "operate", **asked) for engine_id in self._engine_ids()))

    async def tell(self, changes: NameChanges) -> None:
        """Tell every replica what names stand for; one that is gone is told when it is back."""
        await asyncio.gather(*(self._tell(one, changes) for one in self._engine_ids()))

    def share(self, engine_id: str, changes: NameChanges) -> None:
        """Tell a replica that has come what it may not know; one that is gone again needs nothing."""
        if changes:
            self._sharing.append(asyncio.ensure_future(self._tell(engine_id, changes)))
            self._sharing = [task for task in self._sharing if not task.done()]

    async def _operate(self, engine_id: str, operation: str, arguments: tuple, works: bool) -> Any:
        return await self.call(engine_id, "operate", works=works, operation=operation, arguments=arguments)

    async def _tell(self, engine_id: str, changes: NameChanges) -> None:
        # What engines keep is computed and written before this returns.
        await self._try(engine_id, "tell", works=True, changes=changes)

    async def _try(self, engine_id: str, name: str, **arguments: Any) -> None:
        """A call of an engine that may be gone."""
        try:
            await self.call(engine_id, name, **arguments)
        except Exception as error:
            # As above.
            logger.warning("Engine %s has not answered %s", engine_id, name, exc_info=error)
