"""An engine pool over engines of this process, joined without Ray."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from tests.deployments.engine_world import ThreadedEngine
from tests.fakes import BLOCK_SIZE, VOCAB_SIZE, FakeEngine
from wingbeat.deployments.fleet.catalog import NameChanges, Names
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.wire import WireRequest, encode
from wingbeat.deployments.replica.router_stream import RouterStream
from wingbeat.runtime.scheduling.request import Request, RequestOutput, SamplingParams, Variant


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


class LocalEngines:
    """Engines in this process, with the verifier's stream semantics and a way to kill them."""

    def __init__(self, *names: str, round_s: float = 0.002, engine: Callable[..., FakeEngine] = FakeEngine) -> None:
        self.engines = {name: engine(round_s) for name in names}
        self.loops = {name: ThreadedEngine(engine) for name, engine in self.engines.items()}
        self.names = {name: Names() for name in names}
        self.killed: set[str] = set()
        self.streams: dict[str, list[RouterStream]] = {name: [] for name in names}
        self.listeners: list[Callable[[frozenset[str]], None]] = []
        self.messages = 0
        self.num_described = 0

    async def describe(self) -> ModelInfo:
        self.num_described += 1
        return ModelInfo("fake", 200, VOCAB_SIZE, block_size=BLOCK_SIZE)

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        listener(frozenset(self.loops))
        return lambda: self.listeners.remove(listener)

    async def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        self._require_alive(engine_id)
        stream = self.loops[engine_id].connect(client_id)
        stream.tell_names(self.names[engine_id].changes())
        self.streams[engine_id].append(stream)
        try:
            yield encode([])
            while True:
                message = await stream.take()
                self._require_alive(engine_id)
                self.messages += 1
                yield message
        finally:
            self.loops[engine_id].client.disconnect(client_id)

    async def call(self, engine_id: str, name: str, **arguments: Any) -> Any:
        self._require_alive(engine_id)
        return await getattr(self, name)(engine_id, **arguments)

    async def exchange(
        self, engine_id: str, client_id: str, requests: list[WireRequest], withdrawn: list[int], aborted: list[int]
    ) -> None:
        client = self.loops[engine_id].client
        if requests:
            client.submit(client_id, requests)
        client.withdraw(client_id, withdrawn)
        client.abort(client_id, aborted)

    async def operate(self, engine_id: str, operation: str, arguments: tuple) -> Any:
        if operation == "load_adapter" and not hasattr(self.engines[engine_id], "keepers"):
            name, path = arguments
            return Variant(name, path, f"digest of {path}"), ""
        return await self.loops[engine_id].client.call("operate", operation, arguments)

    async def tell(self, engine_id: str, changes: NameChanges) -> None:
        changed, client = self.names[engine_id].merge(changes), self.loops[engine_id].client
        client.tell_names(changed)
        for kind, entries in changed.items():
            await client.call("keep_names", kind, entries)

    def kill(self, name: str) -> None:
        """The process is gone from one moment to the next: connections break without a word."""
        self.killed.add(name)
        for stream in self.streams[name]:
            stream.end(ConnectionError(f"{name} was killed by the test"))

    def _require_alive(self, name: str) -> None:
        if name in self.killed:
            raise ConnectionError(f"{name} was killed by the test")

    def serves(self, name: str, prompt: tuple[int, ...]) -> bool:
        """Whether a live engine runs or queues a request with this beginning of the prompt."""
        if self.loops[name].failure is not None or name in self.killed:
            return False
        return any(other[: len(prompt)] == prompt for other in self.engines[name].prompts())

    def announce(self, *names: str) -> None:
        for listener in self.listeners:
            listener(frozenset(names))

    def close(self) -> None:
        for loop in self.loops.values():
            loop.close()


def run(
    scenario: Callable[[LocalEngines, EnginePool], Awaitable[None]],
    *names: str,
    engine: Callable[..., FakeEngine] = FakeEngine,
    **limits: float,
) -> None:
    """Run a scenario on a started pool."""

    async def main() -> None:
        source = LocalEngines(*names, engine=engine)
        pool = EnginePool(source, **{"max_num_seqs": 16, "max_queued_requests": 16, **limits})
        try:
            await pool.start()
            while len(pool.loads()) < len(names):
                await asyncio.sleep(0.001)
            await asyncio.wait_for(scenario(source, pool), 60)
        finally:
            await pool.close()
            source.close()

    asyncio.run(main())


def make_request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), count: int = 20, seed: int = 7) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=count, seed=seed))


async def collect(pool: EnginePool, request: Request) -> list[RequestOutput]:
    return [output async for output in pool.generate(request)]


def tokens(outputs: list[RequestOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.token_ids)
