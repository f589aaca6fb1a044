"""Continuous load until stopped: clients repeat the same mixed requests, and record when every token arrives."""

import asyncio
import bisect
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

TIMEOUT_S = 300.0
AFTER_FAILURE_S = 0.5
FLOWING_S = 1.0
"""Maximum age in seconds of a stream's last piece for the stream to count as flowing, not waiting for something
else."""


def mixed_bodies(texts: list[str], tokens: int, model: str) -> list[dict[str, Any]]:
    """Request bodies of mixed kinds: streamed or not, greedy or sampled, several choices.

    Each choice has about `tokens` tokens, and some requests have a stop string.
    """
    return [
        {
            "model": model,
            "prompt": text,
            "max_tokens": tokens // 2 + (17 * index) % tokens,
            "temperature": 0.8 * (index % 2),
            "seed": 1000 * index,
            "n": 1 + (index % 5 == 3) + 2 * (index % 7 == 5),
            "stream": index % 3 != 2,
            "ignore_eos": True,
            "stop": ["\n\n\n"] if index % 6 == 4 else [],
        }
        for index, text in enumerate(texts)
    ]


class Answer(NamedTuple):
    """Part of an answer that must be the same whenever the request is sent."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]


@dataclass
class Trace:
    """A request, in flight or ended."""

    number: int
    """Index of the request in the list of bodies."""
    started_s: float
    arrivals: dict[int, list[float]] = field(default_factory=dict)
    """Arrival times of pieces by choice; for streams only."""
    ended_s: float | None = None
    answer: Answer | None = None
    failure: str | None = None
    broken: list[tuple[str, ...]] = field(default_factory=list)
    """Texts received each time when the connection broke and the request was sent again."""

    def waits_s(self, at_s: float) -> Iterator[float]:
        """Waits for the next piece around an instant, for every choice that was flowing then, in seconds.

        A wait starts at the instant, or at the last piece soon after it, because pieces already in transit still arrive
        after a failure. A choice that has waited longer before is waiting for something else, and is left out.
        """
        for times in self.arrivals.values():
            first = bisect.bisect_left(times, at_s - FLOWING_S)
            last = bisect.bisect_right(times, at_s + FLOWING_S)
            gaps = itertools.pairwise(times[first : last + 1])
            yield from (end - max(start, at_s) for start, end in gaps if end > at_s)


class SteadyLoad:
    """Sends `bodies` in turn to `url`/v1/completions, `concurrency` at a time, until stopped.

    Args:
        repeat_s: seconds during which a request is retried if its connection breaks or is refused, as most clients do;
            0 makes it fail immediately.
    """

    def __init__(self, url: str, bodies: list[dict[str, Any]], concurrency: int, repeat_s: float = 0.0) -> None:
        self.traces: list[Trace] = []
        self._url = f"{url}/v1/completions"
        self._bodies = bodies
        self._concurrency = concurrency
        self._repeat_s = repeat_s
        self._numbers = itertools.cycle(range(len(bodies)))
        self._stopped = False

    def stop(self) -> None:
        """Sends no more requests; those in flight are still answered."""
        self._stopped = True

    async def run(self) -> None:
        """Runs until stopped and every request is answered."""
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as http,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(self._concurrency):
                clients.create_task(self._client(http))

    async def _client(self, http: httpx.AsyncClient) -> None:
        while not self._stopped:
            trace = Trace(next(self._numbers), time.perf_counter())
            self.traces.append(trace)
            try:
                trace.answer = await self._answer(http, self._bodies[trace.number], trace)
            except (httpx.HTTPError, RequestFailed) as error:
                trace.failure = f"{type(error).__name__}: {error}"
                await asyncio.sleep(AFTER_FAILURE_S)
            trace.ended_s = time.perf_counter()

    async def _answer(self, http: httpx.AsyncClient, body: dict[str, Any], trace: Trace) -> Answer:
        while True:
            texts = [""] * body["n"]
            try:
                return await self._send(http, body, trace, texts)
            except (httpx.TransportError, ServerGone):
                if time.perf_counter() > trace.started_s + self._repeat_s:
                    raise
                trace.broken.append(tuple(texts))
                await asyncio.sleep(AFTER_FAILURE_S)

    async def _send(self, http: httpx.AsyncClient, body: dict[str, Any], trace: Trace, texts: list[str]) -> Answer:
        if not body["stream"]:
            response = await http.post(self._url, json=body)
            _check(response.status_code, response.text)
            choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
            return Answer(tuple(c["text"] for c in choices), tuple(c["finish_reason"] for c in choices))
        reasons = [""] * body["n"]
        async with http.stream("POST", self._url, json=body) as response:
            if response.status_code != httpx.codes.OK:
                _check(response.status_code, (await response.aread()).decode())
            async for line in response.aiter_lines():
                for choice in _choices(line):
                    index = choice["index"]
                    texts[index] += choice["text"]
                    reasons[index] = choice["finish_reason"] or reasons[index]
                    trace.arrivals.setdefault(index, []).append(time.perf_counter())
        if not all(reasons):
            raise RequestFailed(f"the stream ended without a finish reason: {reasons}")
        return Answer(tuple(texts), tuple(reasons))


class RequestFailed(RuntimeError):
    """The server refused a request, or ended its stream with an error."""


class ServerGone(RequestFailed):
    """The proxy answered in place of a router that has ended."""


def _check(status: int, text: str) -> None:
    if status == httpx.codes.OK:
        return
    problem = f"{status}: {text[:300]}"
    # A router's own answers are JSON.
    raise RequestFailed(problem) if text.startswith("{") else ServerGone(problem)


def _choices(line: str) -> list[dict[str, Any]]:
    """Choices in one line of a stream of server-sent events."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return []
    chunk = json.loads(data)
    if "error" in chunk:
        raise RequestFailed(f"in the stream: {chunk['error']}")
    return chunk["choices"]


class Comparison(NamedTuple):
    """Result of comparing requests with their known answers."""

    num_requests: int
    failures: list[str]
    differences: list[str]


def compare(traces: list[Trace], answers: dict[int, Answer]) -> Comparison:
    """Compares every ended request with `answers`, by the request's number."""
    failures, differences = [], []
    ended = [trace for trace in traces if trace.ended_s is not None]
    for trace in ended:
        differences += [
            f"request {trace.number}, before its connection broke: {texts}, undisturbed {answers[trace.number].texts}"
            for texts in trace.broken
            if not all(map(str.startswith, answers[trace.number].texts, texts))
        ]
        if trace.failure is not None:
            failures.append(f"request {trace.number}: {trace.failure}")
        elif trace.answer != answers[trace.number]:
            differences.append(f"request {trace.number}: {_first_difference(trace.answer, answers[trace.number])}")
    return Comparison(len(ended), failures, differences)


def _first_difference(got: Answer, known: Answer) -> str:
    for choice, (one, other) in enumerate(zip(got.texts, known.texts, strict=True)):
        if one != other:
            at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), len(one))
            return f"choice {choice} from character {at}: {one[at : at + 40]!r}, undisturbed {other[at : at + 40]!r}"
    return f"finish reasons {got.finish_reasons}, undisturbed {known.finish_reasons}"
