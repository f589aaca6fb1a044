"""The streams of all routers at one engine, and what each of them is told beside its own outputs."""

import asyncio

from wingbeat.cluster.prefix_index import PrefixIndex
from wingbeat.deployments.fleet.catalog import NameChanges
from wingbeat.deployments.replica.client_loads import ClientLoad, ClientLoads
from wingbeat.deployments.replica.router_stream import RouterStream
from wingbeat.runtime.kv.cache_log import CacheChanges

TELL_LOADS_S = 0.1
"""Between two times that routers are told of each other's requests."""


class RouterStreams:
    """By client, used on one event loop.

    Args:
        loads: what each client has at the engine.
    """

    def __init__(self, loads: ClientLoads) -> None:
        self._loads = loads
        self._event_loop = asyncio.get_running_loop()
        self._streams: dict[str, RouterStream] = {}
        self._cached = PrefixIndex()
        self._stalled = False
        self._told: dict[str, ClientLoad] = {}
        """What each router was last told that others have here."""
        self._telling = False

    def __contains__(self, client_id: str) -> bool:
        return client_id in self._streams

    def open(self, client_id: str) -> RouterStream:
        """A client's new stream."""
        stream = self._streams[client_id] = RouterStream()
        if len(self._cached):
            stream.tell_cached(self._cached.snapshot())
        if self._stalled:
            stream.tell_stalled(True)
        self.tell_loads_soon()
        return stream

    def get(self, client_id: str) -> RouterStream | None:
        """A client's stream, if it has one."""
        return self._streams.get(client_id)

    def close(self, client_id: str, error: Exception) -> bool:
        """End a client's stream; returns whether there was one."""
        stream = self._streams.pop(client_id, None)
        if stream is None:
            return False
        stream.end(error)
        self._loads.left(client_id)
        self._told.pop(client_id, None)
        self.tell_loads_soon()
        return True

    def end_all(self, error: Exception) -> None:
        """End every stream once what is there has been taken."""
        for stream in self._streams.values():
            stream.end(error)

    def tell_names(self, changes: NameChanges) -> None:
        """Tell every router what adapters and prefixes there are."""
        for stream in self._streams.values():
            stream.tell_names(changes)

    def tell_cached(self, changes: CacheChanges) -> None:
        """Tell every router what the engine's prefix cache has gained and lost."""
        self._cached.apply(changes)
        for stream in self._streams.values():
            stream.tell_cached(changes)

    def tell_stalled(self, stalled: bool) -> None:
        """Tell every router whether the engine makes no progress, where that has changed."""
        if stalled != self._stalled:
            self._stalled = stalled
            for stream in self._streams.values():
                stream.tell_stalled(stalled)

    def tell_loads_soon(self) -> None:
        """Tell routers of each other's requests, not more often than they need to know."""
        # A router that is alone here knows all there is.
        if not self._telling and (len(self._streams) > 1 or self._told):
            self._telling = True
            self._event_loop.call_later(TELL_LOADS_S, self._tell_loads)

    def _tell_loads(self) -> None:
        """Tell each router what the others have here, where that has changed."""
        self._telling = False
        loads = self._loads.by_client()
        num_requests, num_tokens = (sum(figures) for figures in zip(ClientLoad(), *loads.values(), strict=True))
        for client_id, stream in self._streams.items():
            own = loads.get(client_id, ClientLoad())
            others = ClientLoad(num_requests - own.num_requests, num_tokens - own.num_tokens)
            if others != self._told.get(client_id, ClientLoad()):
                self._told[client_id] = others
                stream.tell_others(*others)
