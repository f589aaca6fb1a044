"""A pair in separate processes without Ray and HTTP: the engine as in a replica, the drafter as a plain child."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from wingbeat.cluster.channels.header import ChannelName
from wingbeat.cluster.cores import claim_core
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.wire import WireRequest, decode
from wingbeat.deployments.replica.drafters.drafter_actor import DrafterActor
from wingbeat.deployments.replica.engine.engine_messages import EngineStart
from wingbeat.deployments.replica.engine_client import EngineClient
from wingbeat.deployments.replica.engine_life import EngineLife
from wingbeat.runtime.scheduling.request import Request, SamplingParams

CLIENT = "benchmark"


class PlainDrafter:
    """Replaces `RayDrafter` by a child process.

    Args:
        reach: converts a channel's name to the name by which this drafter connects.
    """

    def __init__(
        self,
        config: AppConfig,
        core: int | None,
        terms: bytes | None = None,
        reach: Callable[[ChannelName], ChannelName] | None = None,
    ) -> None:
        self._reach = reach or (lambda name: name)
        self._actor = DrafterActor(config, core, terms)
        self._lock = asyncio.Lock()
        self.terms = terms

    async def needs(self, terms: bytes) -> bytes:
        """Returns the drafter's needs of its verifier."""
        self.terms = terms
        return await self.call("needs", terms)

    async def attach(self, channel_name: ChannelName, next_incarnation: Callable[[], int]) -> int:
        """Attaches the drafter to a channel when it is ready; returns its process id."""
        return await self.call("attach", self._reach(channel_name), next_incarnation())

    async def renew(self) -> bool:
        """Returns False: the benchmark never replaces a drafter."""
        return False

    def kill(self) -> None:
        """Ends the drafter without waiting."""
        self._actor.close()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Runs a method of `DrafterCalls`, after all earlier calls."""
        async with self._lock:
            return await asyncio.to_thread(self._actor.call, name, *arguments)


@contextlib.asynccontextmanager
async def process_engine(
    config: AppConfig,
    address: str | None = None,
    reach: Callable[[ChannelName], ChannelName] | None = None,
    shares_core: bool = True,
) -> AsyncIterator[EngineClient]:
    """Starts an engine as a replica would, on a core of its own if one is available.

    Args:
        address: address to listen on for a drafter that connects over the network.
        reach: as for `PlainDrafter`.
        shares_core: keeps the pair on one core if a replica would.
    """
    claim = claim_core() if shares_core and config.shares_core() else None
    core = None if claim is None else claim.core
    launch = (lambda terms: PlainDrafter(config, core, terms, reach)) if config.has_drafter() else None
    life = EngineLife(EngineStart(config, "benchmark", core, address=address), launch)
    try:
        await life.start()
        yield life.client
    finally:
        await life.end()
        if claim is not None:
            claim.release()


async def generate(client: EngineClient, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Runs prompts concurrently to their ends; returns their tokens.

    Raises:
        RuntimeError: the engine gave up a request.
    """
    stream = client.connect(CLIENT)
    try:
        requests = [Request("", tuple(prompt), params) for prompt in prompts]
        client.submit(CLIENT, [WireRequest(number, request) for number, request in enumerate(requests)])
        tokens: list[list[int]] = [[] for _ in prompts]
        num_left = len(prompts)
        while num_left:
            for output in decode(await stream.take()).outputs:
                if output.given_up is not None:
                    raise RuntimeError(f"the engine gave a request up: {output.given_up}")
                tokens[output.number] += output.token_ids
                num_left -= output.finish_reason is not None
        return tokens
    finally:
        client.disconnect(CLIENT)


class ThreadUse(NamedTuple):
    """Processor time of one thread of a process."""

    name: str
    cpu_s: float
    core: int
    """Core that the thread ran on last."""


def thread_times(pid: int) -> dict[int, ThreadUse]:
    """Processor time of each thread of a process so far."""
    ticks_per_s, found = 100.0, {}
    for path in Path(f"/proc/{pid}/task").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            head, _, tail = path.read_text().rpartition(")")
            fields = tail.split()
            used_s = (int(fields[11]) + int(fields[12])) / ticks_per_s
            found[int(path.parent.name)] = ThreadUse(head.partition("(")[2], used_s, int(fields[36]))
    return found


class ThreadWatch:
    """Share of a core that each thread of a process takes, between construction and `shares`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = thread_times(pid)
        self._started = time.perf_counter()

    def shares(self) -> list[dict[str, Any]]:
        """Threads that worked, busiest first: name, share of a core, and the core of the last run."""
        elapsed_s, now = time.perf_counter() - self._started, thread_times(self._pid)
        rows = [
            {
                "name": use.name,
                "share": (use.cpu_s - self._before.get(tid, ThreadUse("", 0.0, 0)).cpu_s) / elapsed_s,
                "core": use.core,
            }
            for tid, use in now.items()
        ]
        return sorted((row for row in rows if row["share"] > 0.005), key=lambda row: -row["share"])
