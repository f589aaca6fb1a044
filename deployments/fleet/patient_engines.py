"""Calls to engines with a limit each: a replica that hangs, or an answer that is lost, holds nobody up for ever."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.fleet.interface import ModelInfo

if TYPE_CHECKING:
    from wingbeat.deployments.fleet.connection import EngineTransport

logger = logging.getLogger(__name__)
CALL_S = 30.0
"""For what a replica does by itself. A connection whose call takes longer is lost, and its requests go on elsewhere."""
WORK_S = 960.0
"""For what its engine does, such as computing a prefix: a little longer than the replica gives the engine."""
DESCRIBE_S = 120.0
"""For an answer that may wait for a replica to start; then it is asked for again."""


class PatientEngines:
    """An `EngineTransport` over another one.

    Every call raises TimeoutError, by the name of what did not answer, beside what the other one raises.
    """

    def __init__(self, transport: "EngineTransport") -> None:
        self._transport = transport
        self.subscribe: Callable[[Callable[[frozenset[str]], None]], Callable[[], None]] = transport.subscribe

    async def describe(self) -> ModelInfo:
        """The model, from any engine; waits until one is there."""
        while True:
            try:
                async with asyncio.timeout(DESCRIBE_S):
                    return await self._transport.describe()
            except TimeoutError:
                logger.warning("No engine has said within %.0f s what it serves: asking again", DESCRIBE_S)

    def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        """Messages without a limit: signs of life, which have one, end a connection where no message comes."""
        return self._transport.stream(engine_id, client_id)

    async def call(self, engine_id: str, name: str, *, works: bool = False, **arguments: Any) -> Any:
        """A call of the other one.

        Args:
            works: whether the engine may take its time for it.
        """
        limit_s = WORK_S if works else CALL_S
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._transport.call(engine_id, name, **arguments)
        except TimeoutError:
            if not limit.expired():
                raise
            asked = arguments.get("operation", name)
            raise TimeoutError(f"engine {engine_id} has not answered {asked} within {limit_s:.0f} s") from None
