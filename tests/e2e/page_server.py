"""The HTTP application over an engine with its drafter in this process, behind a socket; no Ray."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tests.deployments.pool_world import LocalEngines
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.parsing.registry import Parsers
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.llm import LLM

MAX_NUM_SEQS = 4


def demo_llm() -> LLM:
    """The demo pair."""
    verifier, drafter = demo_pair()
    # Trees of a fixed shape: on a busy machine the measured costs may say that drafting does not pay.
    speculation = SpeculationConfig(draft_steps=5, draft_top_k=3, adaptive=False)
    config = EngineConfig(max_num_seqs=MAX_NUM_SEQS, max_model_len=1024, speculation=speculation)
    return LLM(verifier, drafter, config, InProcessChannel)


class DemoEngine(LocalEngines):
    """The demo pair, as a router reaches it. Make it on a running event loop."""

    def __init__(self, llm: LLM) -> None:
        self._vocab_size = llm.engine.loaded.vocab_size
        super().__init__("demo", engine=lambda _: llm.engine)

    async def describe(self) -> ModelInfo:
        return ModelInfo("wingbeat-demo", 1024, self._vocab_size, drafter="demo")


@contextmanager
def serving(access: Access | None = None, parsers: Parsers | None = None) -> Iterator[str]:
    """The URL of a server that answers with the demo pair, for as long as the block lasts."""
    llm = demo_llm()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ready, ends = threading.Event(), []

        async def serve() -> None:
            engines = DemoEngine(llm)
            pool = EnginePool(engines, max_num_seqs=MAX_NUM_SEQS, max_queued_requests=16)
            await pool.start()
            app = create_app(CompletionService(pool, llm.tokenizer, parsers), access)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
            ends.append(server)
            ready.set()
            try:
                await server.serve(sockets=[listener])
            finally:
                await pool.close()
                engines.close()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        ready.wait(60)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for server in ends:
                server.should_exit = True
            thread.join(20)
