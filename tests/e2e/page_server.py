"""The HTTP application over an engine with its drafter in this process, behind a socket; no Ray."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from tests.deployments.pool_world import LocalEngines
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.completions import ChatReader, CompletionService
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.parts import first_result
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.llm import LLM

MAX_NUM_SEQS = 4


def demo_llm(adaptive: bool = False) -> LLM:
    """The demo pair."""
    verifier, drafter = demo_pair()
    # Trees of a fixed shape: on a busy machine the measured costs may say that drafting does not pay.
    speculation = SpeculationConfig(draft_steps=5, draft_top_k=3, adaptive=adaptive)
    config = EngineConfig(max_num_seqs=MAX_NUM_SEQS, max_model_len=1024, speculation=speculation)
    return LLM(verifier, drafter, config, InProcessChannel)


class DemoEngine(LocalEngines):
    """The demo pair, as a router reaches it. Make it on a running event loop."""

    def __init__(self, llm: LLM) -> None:
        self._vocab_size = llm.engine.loaded.vocab_size
        llm.engine.grammars = llm.grammars and first_result("serve_grammars", llm.grammars)
        super().__init__("demo", engine=lambda _: llm.engine)

    async def describe(self) -> ModelInfo:
        return ModelInfo("wingbeat-demo", 1024, self._vocab_size, drafter="demo")


@contextmanager
def serving(
    access: Access | None = None,
    parsers: ChatReader | None = None,
    adaptive: bool = False,
    more_routes: Sequence[Callable[[FastAPI], None]] = (),
) -> Iterator[str]:
    """The URL of a server that answers with the demo pair, for as long as the block lasts.

    Args:
        adaptive: trees adapt to measured costs instead of having a fixed shape.
        more_routes: add routes of optional parts.
    """
    llm = demo_llm(adaptive)

    @asynccontextmanager
    async def application() -> AsyncIterator[ASGIApp]:
        engines = DemoEngine(llm)
        pool = EnginePool(engines, max_num_seqs=MAX_NUM_SEQS, max_queued_requests=16)
        await pool.start()
        try:
            service = CompletionService(pool, llm.tokenizer, parsers, of_parts={"loads_adapters": True})
            yield create_app(service, access, more_routes=more_routes)
        finally:
            await pool.close()
            engines.close()

    with listening(application) as url:
        yield url


@contextmanager
def listening(application: Callable[[], AbstractAsyncContextManager[ASGIApp]]) -> Iterator[str]:
    """The URL of a server of this application, which is made on the server's loop."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ready, ends = threading.Event(), []

        async def serve() -> None:
            async with application() as app:
                server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
                ends.append(server)
                ready.set()
                await server.serve(sockets=[listener])

        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        ready.wait(60)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for server in ends:
                server.should_exit = True
            thread.join(20)
