"""An engine's loop in a thread of this process, joined to its client as the engine's process is to its replica."""

import asyncio
import os
import threading
from collections.abc import Iterable
from functools import partial

from tests.fakes import FakeEngine, Vanished
from wingbeat.cluster.channels.link import Link
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.wire import WireRequest
from wingbeat.deployments.replica.engine.engine_calls import EngineCalls
from wingbeat.deployments.replica.engine.engine_loop import EngineLoop
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup
from wingbeat.deployments.replica.engine_client import EngineClient, EngineFailed
from wingbeat.deployments.replica.router_stream import RouterStream


def _taken(keepers, output) -> None:
    for keeper in keepers.values():
        keeper.take(output)


class ThreadedEngine:
    """Both ends. Make it on a running event loop."""

    def __init__(self, engine: FakeEngine, stream_interval_s: float = 0.0, ring_bytes: int = 2**16) -> None:
        link = Link.create(ring_bytes)
        # Duplicate descriptors, so that the two sides can be closed one after the other.
        self._engine_link = Link(*map(os.dup, link.child_fds), is_parent=False)
        keepers = getattr(engine, "keepers", {})
        setup = EngineSetup(engine, ModelInfo("fake", 200, 50), None, keepers=keepers)
        calls = EngineCalls(setup, AppConfig(), "fake")
        self.client = EngineClient(link)
        own = {"grammars": getattr(engine, "grammars", None), "take_own": partial(_taken, keepers)}
        cache_log = getattr(engine, "cache_log", None)
        self.loop = EngineLoop(engine, self._engine_link, calls, stream_interval_s, cache_log=cache_log, **own)
        self._event_loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except Vanished:
            self._event_loop.call_soon_threadsafe(self.client.lose, "it vanished")

    @property
    def failure(self) -> EngineFailed | None:
        return self.client.failure

    @property
    def num_requests(self) -> int:
        return self.client.num_requests

    def connect(self, client_id: str) -> RouterStream:
        return self.client.connect(client_id)

    def submit(self, client_id: str, requests: Iterable[WireRequest]) -> None:
        self.client.submit(client_id, requests)

    def stop(self) -> None:
        """Without the replica's knowledge, as SIGTERM does."""
        if self.thread.is_alive():
            self.loop.stop()
        self.thread.join(10.0)

    def close(self) -> None:
        self.stop()
        self.client.lose("closed by the test")
        self._engine_link.close()
