"""Several engines in processes of their own behind a router's pool, without Ray and HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from process_engine import process_engine

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.wire import encode
from wingbeat.deployments.replica.engine_client import EngineClient


class ProcessFleet:
    """`EngineTransport` over engines of this machine.

    Args:
        tells_prefixes: False hides from routers what the engines have cached.
    """

    def __init__(self, clients: dict[str, EngineClient], info: ModelInfo, tells_prefixes: bool) -> None:
        self._clients = clients
        self._info = info if tells_prefixes else replace(info, block_size=0)

    async def describe(self) -> ModelInfo:
        """The model."""
        return self._info

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Report the engines, which never change."""
        listener(frozenset(self._clients))
        return lambda: None

    async def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        """Messages for a client."""
        stream = self._clients[engine_id].connect(client_id)
        try:
            yield encode([])
            while True:
                yield await stream.take()
        finally:
            self._clients[engine_id].disconnect(client_id)

    async def call(self, engine_id: str, name: str, **arguments: Any) -> Any:
        """An operation, or an exchange of requests."""
        client, client_id = self._clients[engine_id], arguments.get("client_id")
        if name == "operate":
            return await client.call("operate", arguments["operation"], arguments["arguments"])
        if arguments["requests"]:
            client.submit(client_id, arguments["requests"])
        client.withdraw(client_id, arguments["withdrawn"])
        client.abort(client_id, arguments["aborted"])


@contextlib.asynccontextmanager
async def process_engines(config: AppConfig, num_engines: int) -> AsyncIterator[dict[str, EngineClient]]:
    """So many engines of a configuration, by name."""
    async with contextlib.AsyncExitStack() as stack:
        names = [f"engine{number}" for number in range(num_engines)]
        yield {name: await stack.enter_async_context(process_engine(config)) for name in names}


@contextlib.asynccontextmanager
async def router(fleet: ProcessFleet, config: AppConfig, num_engines: int) -> AsyncIterator[EnginePool]:
    """A router's pool that has reached every engine."""
    pool = EnginePool(fleet, max_num_seqs=config.max_num_seqs, max_queued_requests=config.max_queued_requests)
    await pool.start()
    try:
        while len(pool.loads()) < num_engines:
            await asyncio.sleep(0.01)
        yield pool
    finally:
        await pool.close()
