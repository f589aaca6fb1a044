"""The demo pair served by Ray, its drafter in another process: texts, speed, and a killed drafter.

benchmarks/gpu/run.sh served

Starts `wingbeat serve` as a user does, so Ray and Wingbeat must be installed. Greedy and sampled requests, with drafts
and without, eight concurrently and alone: all texts of a prompt must be equal. Without a GPU, --quick serves on the
CPU.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from _harness import Bench, Cases, Figure, Result, run

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from wingbeat.deployments.cli.main import main; sys.exit(main())",
    "serve",
]
PROMPTS = (
    "def main():",
    "import os\n",
    "class Tree:\n    def __init__(self",
    "for i in range(10):\n",
    "    return self.",
    "# The file",
    "try:\n    import json\n",
    "if __name__ ==",
)
TEMPERATURES = (0.0, 0.8)
START_S, ANSWER_S, STOP_S, AGAIN_S = 240.0, 120.0, 40.0, 60.0
READY, ATTACHED = "Ready after", re.compile(r"attached, process (\d+)")
POLL_S = 0.1
KILL_AFTER_S = 0.1
"""Seconds until the streams are under way."""


class Server(NamedTuple):
    """A running `wingbeat serve`."""

    url: str
    log: Path
    ready_s: float
    model: str

    def drafters(self) -> list[int]:
        """Process ids of the drafters attached so far."""
        return [int(pid) for pid in ATTACHED.findall(self.log.read_text())]

    def text(self, prompt: str, num_tokens: int, temperature: float, drafts: bool) -> str:
        """Text of one completion."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": temperature}
        body = json.dumps({**asked, "seed": 7, "ignore_eos": True, "speculation": {"enabled": drafts}}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.load(answer)["choices"][0]["text"]

    def texts(self, num_tokens: int, temperature: float, drafts: bool) -> list[str]:
        """Texts of all prompts, requested concurrently."""
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(lambda prompt: self.text(prompt, num_tokens, temperature, drafts), PROMPTS))


@contextmanager
def serving(bench: Bench, folder: Path, *given: str) -> Iterator[Server]:
    """Runs a server until the block ends.

    Args:
        folder: folder for its log.
        given: options besides port and device.

    Raises:
        RuntimeError: the server does not start; with its last line of output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, options = folder / "serve.log", ["--port", str(port), "--device", bench.device.type, *given]
    with log.open("w") as file, subprocess.Popen([*COMMAND, *options], stdout=file, stderr=file) as server:
        try:
            started = time.monotonic()
            while READY not in log.read_text():
                if server.poll() is not None or time.monotonic() > started + START_S:
                    said = (log.read_text().strip().splitlines() or ["nothing"])[-1]
                    raise RuntimeError(f"the server does not start; it said last: {said}")
                time.sleep(POLL_S)
            ready_s, url = time.monotonic() - started, f"http://127.0.0.1:{port}"
            with urllib.request.urlopen(f"{url}/v1/models", timeout=ANSWER_S) as answer:
                model = json.load(answer)["data"][0]["id"]
            yield Server(url, log, ready_s, model)
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def asked(bench: Bench, server: Server, temperature: float) -> list[Figure]:
    """Sends requests plainly and with drafts, twice each, of which the second counts; all texts must be equal."""
    num_tokens, figures, texts = 16 if bench.quick else 128, [], []
    for drafts in (False, True):
        for _ in range(2):
            began = time.perf_counter()
            texts.append(server.texts(num_tokens, temperature, drafts))
            together_s = time.perf_counter() - began
        began = time.perf_counter()
        alone = server.text(PROMPTS[0], num_tokens, temperature, drafts)
        alone_s = time.perf_counter() - began
        texts.append([alone, *texts[0][1:]])
        label = f"temperature {temperature:g}, {'with drafts' if drafts else 'plain'}"
        figures.append(Figure(f"{label}, {len(PROMPTS)} at once", len(PROMPTS) * num_tokens / together_s, "tokens/s"))
        figures.append(Figure(f"{label}, alone", num_tokens / alone_s, "tokens/s"))
    same = sum(len(set(versions)) == 1 for versions in zip(*texts, strict=True)) / len(PROMPTS)
    return [Figure(f"temperature {temperature:g}: prompts with one text", same, "x", at_least=1.0), *figures]


def killed(bench: Bench, server: Server) -> list[Figure]:
    """Kills a drafter in use: checks that requests end as before, and measures the time until another is attached."""
    num_tokens, before = 64 if bench.quick else 1500, server.drafters()
    expected = server.texts(num_tokens, 0.0, drafts=True)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(server.text, prompt, num_tokens, 0.0, True) for prompt in PROMPTS]
        time.sleep(KILL_AFTER_S)
        os.kill(before[-1], signal.SIGKILL)
        began, under_way = time.monotonic(), sum(not answer.done() for answer in answers)
        same = sum(answer.result() == text for answer, text in zip(answers, expected, strict=True)) / len(PROMPTS)
    while len(server.drafters()) == len(before):
        if time.monotonic() > began + AGAIN_S:
            raise RuntimeError(f"no other drafter is attached {AGAIN_S:.0f} s after one was killed")
        time.sleep(POLL_S)
    return [
        Figure("drafter killed: requests under way", under_way, "requests", at_least=1),
        Figure("drafter killed: texts as before", same, "x", at_least=1.0),
        Figure("drafter killed: another one attached after", time.monotonic() - began, "s"),
    ]


def measure(bench: Bench) -> Result:
    """Runs all measurements on one server."""
    facts: dict[str, Any] = {"pair": "the demo's, in its own dtype", "prompts": f"{len(PROMPTS)}, seeded"}
    cases = Cases(bench, facts)
    with tempfile.TemporaryDirectory() as folder, serving(bench, Path(folder)) as server:
        cases.run("start", lambda: [Figure("ready after", server.ready_s, "s")])
        for temperature in TEMPERATURES:
            cases.run(f"temperature {temperature:g}", lambda t=temperature: asked(bench, server, t))
        cases.run("drafter killed", lambda: killed(bench, server))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
