"""What each router has at an engine, counted from what passes through the engine's replica."""

from typing import NamedTuple

from wingbeat.cluster.autoscaling import ReplicaLoad
from wingbeat.cluster.routing import AnswerLength
from wingbeat.deployments.fleet.wire import WireOutput
from wingbeat.runtime.scheduling.request import Request


class ClientLoad(NamedTuple):
    """Requests that have not ended."""

    num_requests: int = 0
    num_tokens: int = 0
    """Of their prompts, as long as nothing has come back, and what they are expected to write yet."""


class _OpenRequest:
    """One request on its way."""

    __slots__ = ("num_done", "num_prompt", "num_written", "unwritten")

    def __init__(self, request: Request) -> None:
        self.num_prompt, self.num_done = len(request.prompt_token_ids), len(request.output_token_ids)
        self.num_written = 0
        self.unwritten = max(0, request.params.max_tokens - self.num_done)

    @property
    def num_held(self) -> int:
        """Tokens of which it holds KV, once it runs."""
        return self.num_prompt + self.num_done + self.num_written


class ClientLoads:
    """Requests by client and number."""

    def __init__(self) -> None:
        self.answers = AnswerLength()
        self.num_passed = 0
        """Tokens of prompts that were computed, and of outputs, so far."""
        self._open: dict[tuple[str, int], _OpenRequest] = {}

    def submitted(self, client_id: str, number: int, request: Request) -> None:
        """A request goes to the engine; one that is there already is not counted again."""
        self._open.setdefault((client_id, number), _OpenRequest(request))

    def written(self, client_id: str, output: WireOutput) -> None:
        """An output comes back."""
        request, num_tokens = self._open.get((client_id, output.number)), len(output.token_ids)
        if request is None or not num_tokens:
            return
        self.num_passed += num_tokens + (0 if request.num_written else request.num_prompt + request.num_done)
        request.num_written += num_tokens
        request.unwritten = max(0, request.unwritten - num_tokens)
        if output.finish_reason is not None:
            self.answers.add(request.num_done + request.num_written)

    def ended(self, client_id: str, number: int) -> None:
        """A request is gone, for whatever reason; harmless when repeated."""
        self._open.pop((client_id, number), None)

    def left(self, client_id: str) -> None:
        """A client is gone, with all it had."""
        for request in [request for request in self._open if request[0] == client_id]:
            del self._open[request]

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def replica_load(self, num_slots: int, num_kv_tokens: int, tokens_per_s: float) -> ReplicaLoad:
        """What a policy of scaling is told.

        Args:
            num_slots: sequences that the engine runs at once.
            num_kv_tokens: that its pool holds; 0 where that is not known.
            tokens_per_s: what it was measured to do.
        """
        started = [request for request in self._open.values() if request.num_written]
        num_tokens = sum(load.num_tokens for load in self.by_client().values())
        kv_share = sum(request.num_held for request in started) / num_kv_tokens if num_kv_tokens else 0.0
        return ReplicaLoad(self.num_requests, len(started), num_tokens, kv_share, num_slots, tokens_per_s)

    def by_client(self) -> dict[str, ClientLoad]:
        """What each client has there."""
        loads: dict[str, ClientLoad] = {}
        for (client_id, _), request in self._open.items():
            load = loads.get(client_id, ClientLoad())
            to_compute = 0 if request.num_written else request.num_prompt + request.num_done
            num_tokens = to_compute + self.answers.expected_tokens(request.unwritten)
            loads[client_id] = ClientLoad(load.num_requests + 1, load.num_tokens + num_tokens)
        return loads
