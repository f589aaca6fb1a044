"""Transport of an engine pool: calls verifier replicas through a Serve handle."""

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
"""Seconds between two attempts to find an engine that has the router's settings."""


class ServeEngines:
    """`EngineTransport` over Ray Serve; each call names the replica that it is meant for.

    While an application is updated, engines with the old settings and engines with the new settings run at the same
    time.

    Args:
        text_identity: `AppConfig.text_identity` of the router; engines with another identity refuse its requests.
    """

    def __init__(self, handle: DeploymentHandle, text_identity: str) -> None:
        # Calls use Serve's gRPC instead of actor calls. With actor calls, Ray blocks the replica's event loop at the
        # end of a stream until the caller has read the last result, so one hanging router would block all other
        # routers.
        self._handle = handle.options(_by_reference=False)
        self._text_identity = text_identity
        self._streaming = self._handle.options(method_name="stream", stream=True)

    async def describe(self) -> ModelInfo:
        """Returns the description of the model, from any engine that has the router's `text_identity`; waits for such
        an engine.
        """
        told = False
        while (info := await call_apart(self._handle.describe)).text_identity != self._text_identity:
            if not told:
                logger.warning("Waiting for an engine of %s: one has %s", self._text_identity, info.text_identity)
            told = True
            await asyncio.sleep(ASK_AGAIN_S)
        return info

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Calls `listener` with the ids of the live engines, now and after each change; returns a function that ends
        the subscription.
        """
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
        """Calls a method of the `Verifier` that has this engine id."""
        return await call_apart(getattr(self._handle, name), engine_id=engine_id, **arguments)
