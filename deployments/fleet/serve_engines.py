"""Calls to verifier replicas through a Serve handle: the pool's source of engines."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from wingbeat.deployments.fleet.directory import DIRECTORY
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.wire import WireRequest
from wingbeat.deployments.handle_calls import call_apart

logger = logging.getLogger(__name__)
ASK_AGAIN_S = 0.5


class ServeEngines:
    """`EngineTransport` over Ray Serve; each call names the replica it is for.

    While an application is updated, there are engines of its old and its new settings.

    Args:
        text_identity: `AppConfig.text_identity` of the router; engines for which it is another take no requests of it.
    """

    def __init__(self, handle: DeploymentHandle, text_identity: str) -> None:
        # By Serve's gRPC, not as calls of actors: at the end of one of those Ray keeps the replica's event loop until
        # the caller has taken the last result, and a router that hangs would hold up all others.
        self._handle = handle.options(_by_reference=False)
        self._text_identity = text_identity
        self._streaming = self._handle.options(method_name="stream", stream=True)

    async def describe(self) -> ModelInfo:
        """The model, from any engine that serves the router's; waits until one is there."""
        told = False
        while (info := await call_apart(self._handle.describe)).text_identity != self._text_identity:
            if not told:
                logger.warning("Waiting for an engine of %s: one has %s", self._text_identity, info.text_identity)
            told = True
            await asyncio.sleep(ASK_AGAIN_S)
        return info

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Report the live engines now and at every change; returns the way to unsubscribe."""
        return DIRECTORY.subscribe(self._handle.deployment_id, listener)

    async def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        """Messages for this client; closing the generator ends the stream in the engine too."""
        identity = self._text_identity
        messages = call_apart(self._streaming, engine_id=engine_id, client_id=client_id, text_identity=identity)
        try:
            async for message in messages:
                yield message
        finally:
            messages.cancel()

    async def submit(self, engine_id: str, client_id: str, requests: list[WireRequest]) -> None:
        """Hand over requests."""
        await call_apart(self._handle.submit, engine_id=engine_id, client_id=client_id, requests=requests)

    async def abort(self, engine_id: str, client_id: str, numbers: list[int]) -> None:
        """Stop requests; with none, a sign of life."""
        await call_apart(self._handle.abort, engine_id=engine_id, client_id=client_id, numbers=numbers)

    async def withdraw(self, engine_id: str, client_id: str, numbers: list[int]) -> None:
        """Ask for requests back that have not begun to run."""
        await call_apart(self._handle.withdraw, engine_id=engine_id, client_id=client_id, numbers=numbers)

    async def stats(self, engine_id: str, report: dict[str, Any]) -> dict[str, Any]:
        """An engine's figures; it is told this router's on the same occasion."""
        return await call_apart(self._handle.stats, engine_id=engine_id, report=report)

    async def trace(self, engine_id: str, seconds: float) -> list[tuple]:
        """A recording of an engine's next rounds."""
        return await call_apart(self._handle.trace, engine_id=engine_id, seconds=seconds)

    async def load_adapter(self, engine_id: str, name: str, path: str) -> tuple[tuple | None, str]:
        """Have an adapter read and checked: its fields, or None and why it is not served."""
        return await call_apart(self._handle.load_adapter, engine_id=engine_id, name=name, path=path)

    async def unload_adapter(self, engine_id: str, digest: str) -> None:
        """Free an adapter's place."""
        await call_apart(self._handle.unload_adapter, engine_id=engine_id, digest=digest)

    async def tell_adapters(self, engine_id: str, entries: tuple[tuple, ...]) -> None:
        """Tell a replica which adapters there are."""
        await call_apart(self._handle.tell_adapters, engine_id=engine_id, entries=entries)

    async def save_prefix(self, engine_id: str, fields: tuple) -> tuple[str, str] | None:
        """Pin a prefix: None, or code and reason where it cannot be."""
        return await call_apart(self._handle.save_prefix, engine_id=engine_id, fields=fields)

    async def drop_prefix(self, engine_id: str, name: str, version: int) -> None:
        """Let go of one that is not to be kept."""
        await call_apart(self._handle.drop_prefix, engine_id=engine_id, name=name, version=version)

    async def stored_prefix(self, engine_id: str, name: str) -> tuple | None:
        """Fields of the prefix that has this name on disk."""
        return await call_apart(self._handle.stored_prefix, engine_id=engine_id, name=name)

    async def describe_prefixes(self, engine_id: str) -> dict[str, Any]:
        """The prefixes that an engine has."""
        return await call_apart(self._handle.describe_prefixes, engine_id=engine_id)

    async def tell_prefixes(self, engine_id: str, entries: tuple[tuple, ...]) -> None:
        """Tell a replica which prefixes there are."""
        await call_apart(self._handle.tell_prefixes, engine_id=engine_id, entries=entries)

    async def reset_prefix_cache(self, engine_id: str) -> None:
        """Forget cached prefixes."""
        await call_apart(self._handle.reset_prefix_cache, engine_id=engine_id)
