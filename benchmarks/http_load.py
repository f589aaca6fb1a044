"""Closed-loop load over HTTP: each of N clients sends its next completion when its last one has ended.

Uses the streaming OpenAI completions API, so that any such server can be measured. Runs in another process than the
server.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple, Self

import httpx

IDLE_S = 1.0
TIMEOUT_S = 900.0


class LoadError(RuntimeError):
    """The server's answer was not a stream of tokens."""


class Trace(NamedTuple):
    """Measurements of one request by the client."""

    ttft_s: float
    """Seconds from sending the request to its first text."""
    latency_s: float
    """Seconds from sending the request to its last text."""
    num_tokens: int
    text: str
    num_cached_tokens: int
    speculation: dict[str, Any] | None
    """The response extension `metrics.speculative_decoding`; None if the server has none."""

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first."""
        return (self.latency_s - self.ttft_s) / max(1, self.num_tokens - 1)


class Block(NamedTuple):
    """Requests sent under one load, from the first one's start to the last one's end."""

    elapsed_s: float
    traces: list[Trace]
    """Traces in the order of the requests."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of all requests."""
        return sum(trace.num_tokens for trace in self.traces)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all requests together."""
        return self.num_tokens / self.elapsed_s


class LoadClient:
    """HTTP client for load tests, to be used as a context manager."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        # Ignores proxies of the environment, and does not limit connections: the load decides how many there are. An
        # idle connection is not reused: vLLM closes them after 5 s, which is httpx's own limit too.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S)
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._runner.run(self._http.aclose())
        self._runner.close()

    def model_name(self, url: str) -> str:
        """Returns the server's name for its first model. Raises SystemExit if no server answers."""
        try:
            response = self._runner.run(self._http.get(f"{url}/v1/models"))
        except httpx.ConnectError:
            raise SystemExit(f"no server answers at {url}") from None
        return response.raise_for_status().json()["data"][0]["id"]

    def run_block(self, url: str, bodies: list[dict[str, Any]], concurrency: int) -> Block:
        """Streams a completion of every body from `url`/v1/completions, `concurrency` at a time.

        Raises:
            LoadError, httpx.HTTPError: a request failed; the others are cancelled.
        """
        return self._runner.run(self._run_block(url, bodies, concurrency))

    async def _run_block(self, url: str, bodies: list[dict[str, Any]], concurrency: int) -> Block:
        traces: dict[int, Trace] = {}
        waiting = iter(enumerate(bodies))
        started = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(self._send_all(url, waiting, traces))
        elapsed_s = time.perf_counter() - started
        return Block(elapsed_s, [traces[index] for index in range(len(bodies))])

    async def _send_all(self, url: str, waiting: Iterator[tuple[int, dict]], traces: dict[int, Trace]) -> None:
        for index, body in waiting:
            traces[index] = await self._complete(url, body)

    async def _complete(self, url: str, body: dict[str, Any]) -> Trace:
        started = first = last = time.perf_counter()
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        speculation = None
        async with self._http.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != httpx.codes.OK:
                raise LoadError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
            async for chunk in _events(response):
                text = "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))
                if text:
                    last = time.perf_counter()
                    first = first if pieces else last
                    pieces.append(text)
                usage = chunk.get("usage") or usage
                speculation = (chunk.get("metrics") or {}).get("speculative_decoding", speculation)
        if not usage:
            raise LoadError(f"{url} streams no usage, so tokens cannot be counted")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Trace(first - started, last - started, usage["completion_tokens"], "".join(pieces), cached, speculation)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON of each server-sent event."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise LoadError(f"in the stream: {chunk['error']}")
        yield chunk
