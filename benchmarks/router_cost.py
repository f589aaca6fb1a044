"""Processor time of a router's thread per message, per token and per engine report, without HTTP and without Ray.

    .venv/bin/python benchmarks/router_cost.py [--engines 32] [--requests 64]

Simulated engines in the same thread send prepared messages to an `EnginePool`; the router's side decodes them,
detokenizes and writes a line of JSON per output. The measured time is the thread's own processor time, without
preparing the messages.
"""

import argparse
import asyncio
import json
import os
import pickle
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from local_engine import add_model_options, chosen_pair, quiet
from report import RESULTS, Report, Table, machine_facts, middle

from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.fleet.wire import EngineReport, WireOutput, encode
from wingbeat.runtime.kv.block_hashes import HASH_BYTES, CacheChanges
from wingbeat.runtime.scheduling.request import FinishReason, Request, RequestOutput, SamplingParams
from wingbeat.runtime.text_stream import TextStream
from wingbeat.runtime.tokenizer import Tokenizer

BLOCKS_PER_REPORT = 8
TOKENS_PER_OUTPUT = 3


class Case(NamedTuple):
    """Kind of message to measure."""

    name: str
    outputs_per_message: int
    """Number of requests that one message carries tokens for."""
    num_messages: int
    """Messages of every engine."""
    is_report: bool = False


class MadeUpEngines:
    """Engines that answer every request with the same tokens, in messages prepared and pickled as by Ray."""

    def __init__(self, num_engines: int, case: Case) -> None:
        self._names = [f"engine{index}" for index in range(num_engines)]
        self._case = case
        self._submitted: dict[str, list[int]] = {name: [] for name in self._names}
        self.begin = asyncio.Event()
        self.num_left = num_engines
        self.ready: dict[str, list[bytes]] = {}

    async def describe(self) -> ModelInfo:
        return ModelInfo("made up", 100_000, 4096, block_size=16)

    def subscribe(self, listener: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        listener(frozenset(self._names))
        return lambda: None

    async def call(self, engine_id: str, name: str, **arguments: Any) -> None:
        self._submitted[engine_id] += [one.number for one in arguments.get("requests", ())]

    def make(self) -> None:
        """Prepares all messages before the measurement."""
        for name in self._names:
            self.ready[name] = [pickle.dumps(message) for message in self._messages(self._submitted[name])]

    def _messages(self, numbers: list[int]) -> list[bytes]:
        case, tokens = self._case, tuple(range(100, 100 + TOKENS_PER_OUTPUT))
        if case.is_report:
            size = BLOCKS_PER_REPORT * HASH_BYTES
            changes = [CacheChanges(cached=os.urandom(size)) for _ in range(case.num_messages)]
            return [encode([], EngineReport(one, (3, 400))) for one in changes]
        messages: list[bytes] = []
        for index in range(case.num_messages):
            first = index * case.outputs_per_message % max(1, len(numbers))
            taken = numbers[first : first + case.outputs_per_message]
            messages.append(encode([WireOutput.of(number, RequestOutput("", tokens)) for number in taken]))
        return messages

    async def stream(self, engine_id: str, client_id: str) -> AsyncGenerator[bytes, None]:
        """Yields all messages when the measurement begins, then the ends of the requests."""
        yield encode([])
        await self.begin.wait()
        for message in self.ready[engine_id]:
            yield pickle.loads(message)
            await asyncio.sleep(0)
        self.num_left -= 1
        ends = [RequestOutput("", (7,), FinishReason.LENGTH) for _ in self._submitted[engine_id]]
        yield encode([WireOutput.of(number, end) for number, end in zip(self._submitted[engine_id], ends, strict=True)])
        await asyncio.Event().wait()


async def read(pool: EnginePool, request: Request, tokenizer: Tokenizer) -> int:
    """Follows a request as the HTTP layer does; returns the bytes of its lines."""
    text, num_bytes = TextStream(tokenizer, request.prompt_token_ids, ()), 0
    async for output in pool.generate(request):
        piece = text.push(output.token_ids).text
        line = json.dumps({"id": request.request_id, "choices": [{"index": 0, "text": piece}]})
        num_bytes += len(f"data: {line}\n\n".encode())
    return num_bytes


async def measure(case: Case, num_engines: int, num_requests: int, tokenizer: Tokenizer) -> tuple[float, int, int]:
    """Returns processor seconds, number of messages, number of tokens."""
    engines = MadeUpEngines(num_engines, case)
    pool = EnginePool(engines, max_num_seqs=num_requests, max_queued_requests=num_engines * num_requests)
    await pool.start()
    while len(pool.loads()) < num_engines:
        await asyncio.sleep(0)
    total = 0 if case.is_report else num_engines * num_requests
    params = SamplingParams(max_tokens=50_000)
    tasks = [
        asyncio.create_task(read(pool, Request(f"r{index}", (1, 2, 3), params), tokenizer)) for index in range(total)
    ]
    while sum(map(len, engines._submitted.values())) < total:
        await asyncio.sleep(0)
    engines.make()
    started = time.thread_time()
    engines.begin.set()
    while engines.num_left:
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    seconds = time.thread_time() - started
    num_messages = num_engines * case.num_messages
    await pool.close()
    return seconds, num_messages, num_messages * case.outputs_per_message * TOKENS_PER_OUTPUT


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16, help="requests per engine")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    quiet()
    tokenizer = Tokenizer.load(chosen_pair(args).model)
    num_messages = 50 if args.quick else 400
    cases = [
        Case("a message with 1 request's tokens", 1, num_messages),
        Case(f"a message with {args.requests} requests' tokens", args.requests, num_messages // 4),
        Case(f"a report of {BLOCKS_PER_REPORT} blocks and other routers' load", 0, num_messages, is_report=True),
    ]
    rows, figures = [], {}
    for case in cases:
        runs = [asyncio.run(measure(case, args.engines, args.requests, tokenizer)) for _ in range(args.repeats)]
        per_message = middle([1e6 * seconds / messages for seconds, messages, _ in runs])
        per_token = None if case.is_report else middle([1e6 * seconds / tokens for seconds, _, tokens in runs])
        rows.append((case.name, f"{per_message:.0f}", "-" if per_token is None else f"{per_token:.1f}"))
        figures[case.name] = {"us_per_message": per_message, "us_per_token": per_token}
    facts = {
        **machine_facts(),
        "workload": f"{args.engines} engines, {args.requests} requests each, {TOKENS_PER_OUTPUT} tokens at a time",
    }
    table = Table(
        "A router's thread",
        ("what comes", "us of processor", "us per token"),
        rows,
        "Medians; without HTTP, proxy and Ray.",
    )
    report = Report("Cost of a router", facts, [table], figures)
    report.show()
    report.save(args.output or RESULTS / "router_cost.json")


if __name__ == "__main__":
    main()
