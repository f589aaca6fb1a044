"""Streams from one engine to all routers, the load of each router, and the reports that routers get in addition to
outputs.
"""

import asyncio
from typing import Any, NamedTuple

from wingbeat.cluster.routing import AnswerLength, PrefixIndex
from wingbeat.deployments.fleet.catalog import NameChanges
from wingbeat.deployments.fleet.wire import WireOutput
from wingbeat.deployments.replica.router_stream import RouterStream
from wingbeat.runtime.kv.block_hashes import CacheChanges
from wingbeat.runtime.scheduling.request import ALONE_TOKENS, Request


class ClientLoad(NamedTuple):
    """Open requests of one client."""

    num_requests: int = 0
    num_tokens: int = 0
    """Number of tokens still to be computed: prompts of requests without output, and expected output tokens."""


class OpenRequest:
    """A request that the engine has not finished, and its numbers of tokens."""

    __slots__ = ("begins_alone", "num_done", "num_prompt", "num_written", "unwritten")

    def __init__(self, request: Request) -> None:
        self.num_prompt, self.num_done = len(request.prompt_token_ids), len(request.output_token_ids)
        self.begins_alone = request.alone
        self.num_written = 0
        self.unwritten = max(0, request.params.max_tokens - self.num_done)


class ClientLoads:
    """Open requests at one engine, by client and number."""

    def __init__(self) -> None:
        self.answers = AnswerLength()
        self.num_passed = 0
        """Number of tokens that the engine has computed so far, in prompts and outputs."""
        self.open: dict[tuple[str, int], OpenRequest] = {}
        """Open requests by client and number."""

    def submitted(self, client_id: str, number: int, request: Request) -> None:
        """Count a request that is sent to the engine; a request that is already counted is ignored."""
        self.open.setdefault((client_id, number), OpenRequest(request))

    def written(self, client_id: str, output: WireOutput) -> None:
        """Count the tokens of an output of the engine."""
        request, num_tokens = self.open.get((client_id, output.number)), len(output.token_ids)
        if request is None or not num_tokens:
            return
        self.num_passed += num_tokens + (0 if request.num_written else request.num_prompt + request.num_done)
        request.num_written += num_tokens
        request.unwritten = max(0, request.unwritten - num_tokens)
        if output.finish_reason is not None:
            self.answers.add(request.num_done + request.num_written)

    def unbegun(self) -> dict[str, list[int]]:
        """Return, by client, the numbers of requests that have no output tokens yet, from this engine or from an
        earlier engine.
        """
        found: dict[str, list[int]] = {}
        for (client_id, number), request in self.open.items():
            if not request.num_done + request.num_written:
                found.setdefault(client_id, []).append(number)
        return found

    def alone(self) -> tuple[str, int] | None:
        """Return client and number of the request that the engine runs alone; None if there is none.

        A request runs alone if it is the oldest open request that has to begin alone and has at most `ALONE_TOKENS`
        output tokens so far.
        """
        of_them = (key for key, one in self.open.items() if one.begins_alone and one.num_written <= ALONE_TOKENS)
        return next(of_them, None)

    def ended(self, client_id: str, number: int) -> None:
        """Forget a request that has ended, for whatever reason; an unknown request is ignored."""
        self.open.pop((client_id, number), None)

    def left(self, client_id: str) -> None:
        """Forget a client that has disconnected, with all its requests."""
        for request in [request for request in self.open if request[0] == client_id]:
            del self.open[request]

    @property
    def num_requests(self) -> int:
        """Number of open requests."""
        return len(self.open)

    def by_client(self) -> dict[str, ClientLoad]:
        """Return the load of each client."""
        loads: dict[str, ClientLoad] = {}
        for (client_id, _), request in self.open.items():
            load = loads.get(client_id, ClientLoad())
            to_compute = 0 if request.num_written else request.num_prompt + request.num_done
            num_tokens = to_compute + self.answers.expected_tokens(request.unwritten)
            loads[client_id] = ClientLoad(load.num_requests + 1, load.num_tokens + num_tokens)
        return loads


TELL_LOADS_S = 0.1
"""Minimum seconds between two reports to routers about the load of other routers."""


class RouterStreams:
    """Streams by client, used on one event loop.

    Args:
        loads: open requests and load of each client at the engine.
    """

    def __init__(self, loads: ClientLoads) -> None:
        self._loads = loads
        self._event_loop = asyncio.get_running_loop()
        self._streams: dict[str, RouterStream] = {}
        self._cached = PrefixIndex()
        self._state: dict[str, Any] = {}
        """State that was reported to all routers, see `tell`."""
        self._told: dict[str, ClientLoad] = {}
        """For each router, the last report that it got about the load of the other routers."""
        self._telling = False

    def __contains__(self, client_id: str) -> bool:
        return client_id in self._streams

    def open(self, client_id: str) -> RouterStream:
        """Open a client's stream."""
        stream = self._streams[client_id] = RouterStream()
        if len(self._cached):
            stream.tell_cached(self._cached.snapshot())
        stream.tell(**self._state)
        self.tell_loads_soon()
        return stream

    def get(self, client_id: str) -> RouterStream | None:
        """Return a client's stream, None if it has no stream."""
        return self._streams.get(client_id)

    def close(self, client_id: str, error: Exception) -> bool:
        """End a client's stream with an error; returns whether the client had a stream."""
        stream = self._streams.pop(client_id, None)
        if stream is None:
            return False
        stream.end(error)
        self._loads.left(client_id)
        self._told.pop(client_id, None)
        self.tell_loads_soon()
        return True

    def end_all(self, error: Exception) -> None:
        """End every stream once its messages are consumed."""
        for stream in self._streams.values():
            stream.end(error)

    def tell_names(self, changes: NameChanges) -> None:
        """Report changed bindings of names to every router."""
        for stream in self._streams.values():
            stream.tell_names(changes)

    def tell_cached(self, changes: CacheChanges) -> None:
        """Report changes of the engine's prefix cache to every router."""
        self._cached.apply(changes)
        for stream in self._streams.values():
            stream.tell_cached(changes)

    def tell(self, **state: Any) -> None:
        """Report the engine's state, which are fields of `EngineReport`, to every router, as far as it has changed."""
        changed = {name: value for name, value in state.items() if self._state.get(name) != value}
        self._state |= changed
        for stream in self._streams.values() if changed else ():
            stream.tell(**changed)

    def tell_loads_soon(self) -> None:
        """Schedule a report about other routers' load; reports are at least `TELL_LOADS_S` apart."""
        # If this engine has only one router, that router knows the whole load, so no report is needed.
        if not self._telling and (len(self._streams) > 1 or self._told):
            self._telling = True
            self._event_loop.call_later(TELL_LOADS_S, self._tell_loads)

    def _tell_loads(self) -> None:
        """Report to each router the load of all other routers, if that load has changed."""
        self._telling = False
        loads = self._loads.by_client()
        num_requests, num_tokens = (sum(figures) for figures in zip(ClientLoad(), *loads.values(), strict=True))
        for client_id, stream in self._streams.items():
            own = loads.get(client_id, ClientLoad())
            others = ClientLoad(num_requests - own.num_requests, num_tokens - own.num_tokens)
            if others != self._told.get(client_id, ClientLoad()):
                self._told[client_id] = others
                stream.tell(others=tuple(others))
