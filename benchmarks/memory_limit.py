"""`wingbeat serve` within some times its idle memory, while nasty requests come: nothing may be killed.

    .venv/bin/python benchmarks/memory_limit.py [--minutes 30] [--times 1.5] [--grammars]

The limit is the kernel's where this machine lets a memory cgroup be made; else the memory is watched. Exits with 1
where a process was killed, the memory passed the limit, or a bystander's request failed or had another text than alone.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from memory_group import MemoryGroup, memory_by_process
from nasty_requests import GRAMMARS, KINDS, Nasty
from report import RESULTS, Report, Table, machine_facts
from servers import free_port

from wingbeat.cluster.process_tree import descendants, end

SAMPLE_S = 1.0
START_TIMEOUT_S = 300.0
HEALTH_EVERY_S = 0.1
SETTLE_S = 10.0
REQUEST_TIMEOUT_S = 180.0
BYSTANDER = {"prompt": "def parse(lines):\n    ", "max_tokens": 32, "temperature": 0.8, "seed": 11}


class Figures:
    """What is counted while the requests come."""

    def __init__(self) -> None:
        self.answers: dict[str, Counter[str]] = {}
        self.bystanders: Counter[str] = Counter()
        self.health_s: list[float] = []
        self.peak_bytes = 0
        self.largest: Counter[str] = Counter()
        """By process, its most bytes at any time."""


async def attack(url: str, supply: Iterator[Nasty], answers: Counter[str]) -> None:
    """Send one after the other; whatever is answered counts."""
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        for nasty in supply:
            content = nasty.body if isinstance(nasty.body, bytes) else nasty.body()
            try:
                headers = {"Content-Type": "application/json"}
                async with client.stream("POST", nasty.path, content=content, headers=headers) as response:
                    answers[str(response.status_code)] += 1
                    await _read(response, nasty.read_s)
            except (httpx.HTTPError, OSError) as error:
                answers[type(error).__name__] += 1
            await asyncio.sleep(0.05)


async def _read(response: httpx.Response, read_s: float) -> None:
    """A slow reader leaves after `read_s`, whatever it has read."""
    deadline = time.monotonic() + read_s
    async for _ in response.aiter_bytes(1024 if read_s else None):
        if read_s:
            await asyncio.sleep(0.1)
            if time.monotonic() > deadline:
                return


async def stand_by(url: str, expected: str, figures: Figures) -> None:
    """A client that has nothing to do with it: it is answered, and by the same text as ever."""
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        while True:
            try:
                response = await client.post("/v1/completions", json=BYSTANDER)
            except httpx.HTTPError as error:
                figures.bystanders[type(error).__name__] += 1
                continue
            same = response.status_code != 200 or response.json()["choices"][0]["text"] == expected
            figures.bystanders[str(response.status_code) if same else "another text"] += 1
            await asyncio.sleep(0.2 if response.status_code == 200 else 1.0)


async def ask_health(url: str, figures: Figures) -> None:
    """Note how long `/health` takes."""
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        while True:
            began = time.perf_counter()
            with contextlib.suppress(httpx.HTTPError):
                await client.get("/health")
            figures.health_s.append(time.perf_counter() - began)
            await asyncio.sleep(HEALTH_EVERY_S)


async def watch(root: int, figures: Figures) -> None:
    """Note the most memory that all processes have together."""
    while True:
        found = await asyncio.to_thread(memory_by_process, root)
        figures.peak_bytes = max(figures.peak_bytes, sum(found.values()))
        for name, num_bytes in found.items():
            figures.largest[name] = max(figures.largest[name], num_bytes)
        await asyncio.sleep(SAMPLE_S)


async def besiege(url: str, root: int, kinds: list[str], seconds: float, expected: str) -> Figures:
    """All of it at once, for so long."""
    figures, results = Figures(), multiprocessing.get_context("spawn").SimpleQueue()
    # In a process of its own: what it takes to make a request is no time of the server's.
    sender = multiprocessing.get_context("spawn").Process(target=send_all, args=(url, kinds, seconds, results))
    sender.start()
    work = [*(stand_by(url, expected, figures) for _ in range(2)), ask_health(url, figures), watch(root, figures)]
    tasks = [asyncio.create_task(one) for one in work]
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        raise RuntimeError("a client of this script broke") from task.exception()
    figures.answers = await asyncio.to_thread(results.get)
    sender.join()
    return figures


def send_all(url: str, kinds: list[str], seconds: float, results: Any) -> None:
    """Attack for so long; puts the answers' counts by kind."""
    results.put(asyncio.run(_send_all(url, kinds, seconds)))


async def _send_all(url: str, kinds: list[str], seconds: float) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    draw, tasks = random.Random(0), []
    for kind in kinds:
        supply, num_at_once = (KINDS | GRAMMARS)[kind]
        for number in range(num_at_once):
            each = supply(random.Random(draw.random()))
            # They do not all begin by the same.
            tasks.append(asyncio.create_task(attack(url, itertools.islice(each, number, None), counts[kind])))
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return counts


@contextlib.contextmanager
def served(group: MemoryGroup | None, options: list[str]) -> Iterator[tuple[str, int]]:
    """`wingbeat serve` in a group; its address and the process."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("wingbeat")), "serve", "--port", str(port), *options]
    if group is not None:
        command = ["sh", "-c", f'echo $$ > {group.procs} && exec "$@"', "sh", *command]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _healthy(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"wingbeat serve does not answer: {log.read()[-2000:]}")
                time.sleep(0.5)
            yield url, server.pid
        finally:
            below = descendants(server.pid)
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            end(below, 10.0)
            server.kill()


def _healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


def warm_up(url: str) -> str:
    """One request of each common kind; returns the bystander's text."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 32, "logprobs": True}
    httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).raise_for_status()
    schema = {"prompt": "x", "max_tokens": 32, "structured_outputs": {"json_object": True}}
    httpx.post(f"{url}/v1/completions", json=schema, timeout=60).raise_for_status()
    many = {"prompt": ["def f():"] * 16, "n": 4, "max_tokens": 64, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=many, timeout=120).raise_for_status()
    return httpx.post(f"{url}/v1/completions", json=BYSTANDER, timeout=60).json()["choices"][0]["text"]


def report_of(figures: Figures, idle: dict[str, int], times: float, kills: int | None, lost: list[str]) -> Report:
    """Tables of a run."""
    health, sent = sorted(figures.health_s), sum(figures.answers.values(), Counter())
    idle_bytes = sum(idle.values())
    memory = [
        ("all", f"{idle_bytes / 1e6:.0f}", f"{figures.peak_bytes / 1e6:.0f}", f"{figures.peak_bytes / idle_bytes:.2f}")
    ]
    for name, most in figures.largest.most_common(8):
        memory.append((name, f"{idle.get(name, 0) / 1e6:.0f}", f"{most / 1e6:.0f}", ""))
    answered = [(kind, json.dumps(dict(counts.most_common()))) for kind, counts in figures.answers.items()]
    answered.append(("bystanders", json.dumps(dict(figures.bystanders.most_common()))))
    millis = [f"{health[min(len(health) - 1, int(len(health) * part))] * 1e3:.0f}" for part in (0.5, 0.99, 1.0)]
    tables = [
        Table("Memory, MB (proportional)", ("", "idle", "peak", "peak / idle"), memory),
        Table("Answers", ("kind", "status: count"), answered),
        Table("/health, ms", ("", "median", "p99", "most"), [("", *millis)]),
    ]
    limited = "watched" if kills is None else f"the kernel's, {kills} processes killed by it"
    facts = {
        "limit": f"{times} x idle, {limited}",
        "processes lost": ", ".join(lost) or "none",
        "sent": str(sent.total()),
    }
    values = {
        "idle_bytes": idle_bytes,
        "peak_bytes": figures.peak_bytes,
        "kills": kills,
        "lost": lost,
        "answers": {kind: dict(counts) for kind, counts in figures.answers.items()},
        "bystanders": dict(figures.bystanders),
        "health_ms": dict(zip(("median", "p99", "most"), map(float, millis), strict=True)),
    }
    return Report("memory_limit", machine_facts() | facts, tables, values)


def main() -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--times", type=float, default=1.5, help="the limit, in idle memory")
    parser.add_argument("--grammars", action="store_true", help="send grammars, too")
    parser.add_argument("--kinds", help="only these, separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory_limit.json")
    parser.add_argument("options", nargs="*", help="of wingbeat serve, behind --")
    args = parser.parse_args()
    kinds = args.kinds.split(",") if args.kinds else [*KINDS, *(GRAMMARS if args.grammars else ())]
    with MemoryGroup.made(f"wingbeat_{os.getpid()}") as group, served(group, args.options) as (url, root):
        expected = warm_up(url)
        time.sleep(SETTLE_S)
        idle, before = memory_by_process(root), set(memory_by_process(root))
        if group is not None:
            group.limit(int(args.times * sum(idle.values())))
        figures = asyncio.run(besiege(url, root, kinds, 60 * args.minutes, expected))
        lost = sorted(before - set(memory_by_process(root)))
        kills = None if group is None else group.num_kills()
    report = report_of(figures, idle, args.times, kills, lost)
    report.show()
    report.save(args.output)
    failed = {outcome for outcome in figures.bystanders if outcome not in ("200", "503")}
    over = figures.peak_bytes > args.times * sum(idle.values())
    return int(bool(failed or lost or kills or over))


if __name__ == "__main__":
    sys.exit(main())
