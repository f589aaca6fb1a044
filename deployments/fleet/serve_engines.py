"""Calls to verifier replicas through a Serve handle; the pool's transport."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from wingbeat.deployments.fleet.directory import DIRECTORY
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.handle_calls import call_apart

logger = logging.getLogger(__name__)
ASK_AGAIN_S = 0.5
"""Seconds between calls for an engine with the router's settings."""


class ServeEngines:
    """`EngineTransport` over Ray Serve; each call names its replica.

    While an application is updated, engines of its old and its new settings exist side by side.

    Args:
        text_identity: `AppConfig.text_identity` of the router; engines with another identity refuse its requests.
    """

    def __init__(self, handle: DeploymentHandle, text_identity: str) -> None:
        # Serve's gRPC instead of actor calls: at the end of an actor's stream Ray blocks the replica's event loop until
        # the caller has taken the last result, so that a hanging router would block all other routers.
        self._handle = handle.options(_by_reference=False)
        self._text_identity = text_identity
        self._streaming = self._handle.options(method_name="stream", stream=True)

    async def describe(self) -> ModelInfo:
        """Returns the model from any engine with the router's `text_identity`; waits until there is one."""
        told = False
        while (info := await call_apart(self._handle.describe)).text_identity != self._text_identity:
            if not told:
                logger.warning("Waiting for an engine of %s: one has %s", self._text_identity, info.text_identity)
            told = True
            await asyncio.sleep(ASK_AGAIN_S)
        return info

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Calls `listener` with the live engines now and at each change; returns the unsubscribe function."""
        return DIRECTORY.subscribe(self._handle.deployment_id, listener)

    async def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        """Yields messages for this client; closing the generator ends the stream in the engine too."""
        identity = self._text_identity
        messages = call_apart(self._streaming, engine_id=engine_id, client_id=client_id, text_identity=identity)
        try:
            async for message in messages:
                yield message
        finally:
            messages.cancel()

    async def call(self, engine_id: str, name: str, **arguments: Any) -> Any:
        """Calls a method of one `Verifier`."""
        return await call_apart(getattr(self._handle, name), engine_id=engine_id, **arguments)
