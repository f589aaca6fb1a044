"""An engine pool over replicas of this process, with engines in processes of their own; without Ray or Serve."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.replica import verifier_replica
from wingbeat.deployments.replica.verifier_replica import Verifier


class Replica(Verifier):
    """A verifier whose end is awaited, as Serve does; Python's own finalizer does nothing."""

    def __del__(self) -> None:
        pass

    async def end(self) -> None:
        """Serve's hook."""
        await super().__del__()


async def started(name: str, config: AppConfig) -> Replica:
    """A replica that has an engine."""
    with pytest.MonkeyPatch.context() as patched:
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))
        patched.setattr(verifier_replica, "show_log", lambda: None)
        patched.setattr(verifier_replica.serve, "get_replica_context", lambda: context)
        made = Replica.__new__(Replica)
        await made.__init__(config)
    return made


class LocalReplicas:
    """`EngineTransport` to replicas of this process."""

    def __init__(self, replicas: dict[str, Replica]) -> None:
        self.replicas = replicas

    async def describe(self) -> ModelInfo:
        return await next(iter(self.replicas.values())).describe()

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        listener(frozenset(self.replicas))
        return lambda: None

    async def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        async for message in self.replicas[engine_id].stream(engine_id=engine_id, client_id=client_id):
            yield message

    async def call(self, engine_id: str, name: str, **arguments: Any) -> Any:
        return await getattr(self.replicas[engine_id], name)(engine_id=engine_id, **arguments)


@asynccontextmanager
async def pool_of(*names: str, engine_wait_s: float = 30.0, **settings: Any) -> AsyncIterator[EnginePool]:
    """A started pool over replicas of one configuration; `pool.replicas` has them by name."""
    config = AppConfig(**{"drafter": "none"} | settings)
    found = await asyncio.gather(*(started(name, config) for name in names))
    source = LocalReplicas(dict(zip(names, found, strict=True)))
    pool = EnginePool(source, max_num_seqs=16, max_queued_requests=16, engine_wait_s=engine_wait_s)
    pool.replicas = source.replicas
    try:
        await pool.start()
        while len(pool.loads()) < len(names):
            await asyncio.sleep(0.01)
        yield pool
    finally:
        await pool.close()
        await asyncio.gather(*(replica.end() for replica in found))
