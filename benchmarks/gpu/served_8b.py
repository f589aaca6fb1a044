"""The 8B shape served by Ray, its drafter in another process on the same GPU: tokens per second over HTTP.

benchmarks/gpu/run.sh served

Random weights, written to a temporary folder as checkpoints (16 GB), so acceptance is forced as in `engine_speed.py`:
chains of seven, 3.9 tokens per round. Each concurrency is measured plainly and with drafts in turns; then a drafter in
use is killed, and every request must still return all its tokens.
"""

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from _engine import CHAIN, CHAIN_LENGTH, benchmark_mode
from _harness import Bench, Cases, Figure, Result, run
from _model import llama_config, random_head, random_model, shape_facts
from served import ANSWER_S, Server, serving

from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.heads.save import save_eagle_head

AT_ONCE, TURNS = (1, 16, 64), 2
KILLED_AT = 0.75
"""Share of the requests' expected duration after which the drafter is killed: after their prompts."""
LAST_LINES = 12
"""Lines of the server's log about its drafters that are printed."""
JSON = {"content-type": "application/json"}
ROOM = 16
"""Tokens of room for a request besides its prompt and its answer."""


class Load(NamedTuple):
    """Requests of one size."""

    num_tokens: int
    """Tokens of a prompt."""
    max_tokens: int
    at_once: tuple[int, ...]


def load_of(bench: Bench) -> Load:
    """Requests of the measurement."""
    return Load(16, 16, (1, 2)) if bench.quick else Load(1024, 192, AT_ONCE)


def write_pair(bench: Bench, folder: Path) -> tuple[Path, Path]:
    """Writes checkpoints of a verifier and its head, with the demo's tokenizer; prompts are token ids."""
    demo = demo_pair().verifier
    # Tokens that the tokenizer does not know have no text in the answer.
    overrides = {"vocab_size": 4096} if bench.quick else {}
    config = llama_config(bench, **overrides)
    loaded = random_model(bench, config)
    loaded.model.save_pretrained(folder / "verifier")
    for file in demo.glob("*token*"):
        shutil.copy(file, folder / "verifier")
    head = random_head(bench, **overrides)
    save_eagle_head(head, folder / "drafter")
    return folder / "verifier", folder / "drafter"


def answer(server: Server, prompt: list[int], max_tokens: int, drafts: bool) -> int:
    """Number of tokens of one completion."""
    asked = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**asked, "speculation": {"enabled": drafts}}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, JSON)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return json.load(response)["usage"]["completion_tokens"]


def answers(server: Server, load: Load, at_once: int, drafts: bool) -> float:
    """Tokens per second of `at_once` concurrent requests, prompts included."""
    prompts = torch.randint(1, 4096, (at_once, load.num_tokens)).tolist()
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        counts = list(pool.map(lambda prompt: answer(server, prompt, load.max_tokens, drafts), prompts))
    if set(counts) != {load.max_tokens}:
        raise RuntimeError(f"answers of {sorted(set(counts))} tokens where {load.max_tokens} were asked for")
    return sum(counts) / (time.perf_counter() - began)


def rates(server: Server, load: Load, at_once: int) -> list[Figure]:
    """Measures plainly and with drafts, in turns, after a warm-up of each."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(1 + TURNS):
        for drafts, measured in speeds.items():
            measured.append(answers(server, load, at_once, drafts))
    plain, drafted = (statistics.median(measured[1:]) for measured in speeds.values())
    return [
        Figure(f"{at_once} at once, plain", plain, "tokens/s"),
        Figure(f"{at_once} at once, chains", drafted, "tokens/s"),
        Figure(f"{at_once} at once, over plain", drafted / plain, "x"),
    ]


def token_times(server: Server, load: Load, prompt: list[int]) -> list[float]:
    """Arrival time of every token of a completion; raises if some are missing."""
    asked = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    body = json.dumps({**asked, "stream": True, "return_token_ids": True}).encode()
    request, times = urllib.request.Request(f"{server.url}/v1/completions", body, JSON), []
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        for line in response:
            if line.startswith(b"data: {"):
                choices = json.loads(line.removeprefix(b"data: ")).get("choices") or [{}]
                times += [time.perf_counter()] * len(choices[0].get("token_ids") or [])
    if len(times) != load.max_tokens:
        raise RuntimeError(f"an answer of {len(times)} tokens where {load.max_tokens} were asked for")
    return times


def killed(server: Server, load: Load) -> list[Figure]:
    """Kills a drafter in use, after every request has its first token."""
    at_once, before = load.at_once[-1], server.drafters()
    prompts = torch.randint(1, 4096, (at_once, load.num_tokens)).tolist()
    lasts_s = at_once * load.max_tokens / answers(server, load, at_once, True)
    with ThreadPoolExecutor(at_once) as pool:
        streams = [pool.submit(token_times, server, load, prompt) for prompt in prompts]
        time.sleep(KILLED_AT * lasts_s)
        killed_at = time.perf_counter()
        os.kill(before[-1], signal.SIGKILL)
        under_way = sum(not stream.done() for stream in streams)
        times = [stream.result() for stream in streams]
    gaps = [later - sooner for one in times for sooner, later in pairwise(one) if later > killed_at]
    rest_s = max(0.0, *(one[-1] - killed_at for one in times))
    told = [line for line in server.log.read_text().splitlines() if "rafter" in line]
    print("\n".join(told[-LAST_LINES:]), file=sys.stderr)
    return [
        Figure("drafter killed: requests under way", under_way, "requests", at_least=1),
        Figure("drafter killed: all of them ended, all tokens there, after", rest_s, "s"),
        Figure("drafter killed: longest time between two tokens of a request", max(gaps, default=0.0), "s"),
        Figure("such requests undisturbed take", lasts_s, "s"),
    ]


@contextmanager
def served_pair(bench: Bench, load: Load) -> Iterator[Server]:
    """Runs a server of the pair."""
    with tempfile.TemporaryDirectory() as folder:
        verifier, drafter = write_pair(bench, Path(folder))
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()  # frees memory for the server's processes
        forced = ",".join(map(str, ForcedAcceptance.length(CHAIN_LENGTH).rates))
        options = {
            "drafter": drafter,
            "draft-steps": CHAIN.draft_steps,
            "draft-top-k": CHAIN.draft_top_k,
            "verify-tree-size": CHAIN.verify_tree_size,
            "max-num-seqs": load.at_once[-1],
            "max-model-len": load.num_tokens + load.max_tokens + ROOM,
            "forced-acceptance": forced,
        }
        given = [f"--{name}={value}" for name, value in options.items()]
        with benchmark_mode(), serving(bench, Path(folder), str(verifier), "--no-adaptive", *given) as server:
            yield server


def measure(bench: Bench) -> Result:
    """Runs all measurements on one server."""
    load, config = load_of(bench), llama_config(bench)
    facts = shape_facts(config, bench.dtype) | {
        "workload": f"greedy, prompts of {load.num_tokens} random tokens, {load.max_tokens} new ones each, over HTTP",
        "acceptance": f"FORCED to {CHAIN_LENGTH} tokens a round of chains; the text is not the model's",
    }
    cases = Cases(bench, facts)
    with served_pair(bench, load) as server:
        cases.run("start", lambda: [Figure("ready after", server.ready_s, "s")])
        for at_once in load.at_once:
            cases.run(f"{at_once} at once", partial(rates, server, load, at_once))
        cases.run("drafter killed", partial(killed, server, load))
    return cases.result


if __name__ == "__main__":
    run(__doc__, measure)
