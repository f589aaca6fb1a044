"""Two servers over HTTP, one of which learns: cost of the running learner, and a promotion amid requests.

    .venv/bin/python benchmarks/learning_http.py [--head KIND] [--domain NAME ...] [--minutes N] [--output FILE]
    .venv/bin/python benchmarks/learning_http.py --model smollm2 --head FOLDER --chain 4 [--minutes N]

Two servers of the demo's verifier or of another model on this machine, with fixed trees or chains, start with one head
(see `learning.py` for the kinds of heads). Clients request completions from the learning server, four at once, for some
minutes; `--busy` gives the learner pauses to train in. Before and after, both servers complete the same held-out
prompts, whose texts must be equal. Then speeds are measured on these prompts, in turn: the learning server with its
learner running, the same with the learner's process stopped, and the static server.
"""

import argparse
import itertools
import json
import math
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from domains import Prompts, prompts_of
from learning_report import Mark, Speeds, add_learning_options, finish
from narrow_head import OLD, first_head
from process_pause import stopped
from servers import App, wingbeat_apps

from wingbeat.deployments.app_config import AppConfig

TOKENS, CLIENTS = 96, 4
PERIOD_S = 20.0
"""Duration of a phase of requests and the pause after it, in seconds."""
MODEL_LEN = 1024
"""Maximum length of a sequence of a model other than the demo's."""
BLOCK_S = 10.0
"""Minimum duration of one speed measurement, in seconds."""


class Asked(NamedTuple):
    """Result of completing a set of prompts."""

    texts: list[str]
    length: float
    """Tokens per round with a draft tree."""
    speed: float
    """Tokens per second."""


def complete(app: App, prompt: str, **fields: Any) -> dict[str, Any]:
    """Requests one completion."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | fields
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{app.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def ask(app: App, prompts: list[str], **fields: Any) -> Asked:
    """Completes prompts, four at once, excluded from learning."""
    began, fields = time.monotonic(), {"speculation": {"learn": False}} | fields
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda prompt: complete(app, prompt, **fields), prompts))
    seconds = time.monotonic() - began
    drafted = [answer["metrics"]["speculative_decoding"] for answer in answers]
    rounds = sum(one["num_drafts"] for one in drafted)
    accepted = sum(one["num_accepted_tokens"] for one in drafted)
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return Asked([answer["choices"][0]["text"] for answer in answers], 1 + accepted / max(1, rounds), tokens / seconds)


def drafter_of(app: App) -> dict[str, Any]:
    """Returns a server's report on its head versions."""
    with urllib.request.urlopen(f"{app.url}/v1/drafter", timeout=60) as answer:
        return json.load(answer)


class Traffic:
    """Clients that request completions of the domains in turn from one server, while not paused."""

    def __init__(self, app: App, served: list[list[str]], fields: dict[str, Any]) -> None:
        self._app, self._served, self._fields = app, served, fields
        self._goes, self._done = threading.Event(), False
        self._busy = threading.Semaphore(CLIENTS)
        self._next = itertools.count()
        self.num_tokens = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while True:
            self._goes.wait()
            if self._done:
                return
            number = next(self._next)
            with self._busy:
                prompts = self._served[number % len(self._served)]
                prompt = prompts[number // len(self._served) % len(prompts)]
                answer = complete(self._app, prompt, **self._fields | {"seed": number})
            self.num_tokens += answer["usage"]["completion_tokens"]

    def go_for(self, seconds: float, busy: float = 1.0) -> None:
        """Sends requests for the share `busy` of `seconds`, in phases, then waits for the remaining answers."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._goes.set()
            time.sleep(min(left, PERIOD_S * busy))
            if busy < 1:
                self._goes.clear()
                time.sleep(max(0.0, min(end - time.monotonic(), PERIOD_S * (1 - busy))))
        self._goes.clear()
        for _ in range(CLIENTS):
            self._busy.acquire()
        for _ in range(CLIENTS):
            self._busy.release()

    def end(self) -> None:
        """Ends the client threads."""
        self._done = True
        self._goes.set()
        for thread in self._threads:
            thread.join()


class Bench:
    """Both servers, and the prompts measured at every mark."""

    def __init__(self, apps: dict[str, App], prompts: dict[str, Prompts], options: argparse.Namespace) -> None:
        self._learning, self._static = apps["learning"], apps["static"]
        self._sets = {domain: found.held[: options.prompts] for domain, found in prompts.items()}
        self._fields = {"temperature": options.temperature, "seed": 1, "max_tokens": options.tokens}
        self._still = {domain: ask(self._static, prompts, **self._fields) for domain, prompts in self._sets.items()}
        self.traffic = Traffic(self._learning, [prompts[name].served for name in options.domain], self._fields)

    def mark(self, minutes: float) -> Mark:
        """Measures both servers, with the learner stopped meanwhile."""
        with stopped(self._learning.stats().get("learner_pid", 0)):
            now = {domain: self._equal(domain) for domain in self._sets}
        drafter = drafter_of(self._learning)
        seconds = (drafter["learner"] or {}).get("seconds", 0.0)
        lengths = {domain: (asked.length, self._still[domain].length) for domain, asked in now.items()}
        return Mark(minutes, self._learning.stats()["head_version"], self.traffic.num_tokens, seconds, lengths)

    def _equal(self, domain: str) -> Asked:
        asked = ask(self._learning, self._sets[domain], **self._fields)
        if asked.texts != self._still[domain].texts:
            raise SystemExit(f"the text of {domain} depends on who drafts")
        return asked

    def speeds(self, domains: list[str], turns: int) -> list[Speeds]:
        """Speeds of both servers on the new domains, in turn."""
        prompts = [prompt for domain in domains for prompt in self._sets[domain]]
        static = ask(self._static, prompts, **self._fields)
        # A learner that is resumed works immediately, then rests: blocks must be much longer than its steps.
        prompts *= math.ceil(BLOCK_S * static.speed / (self._fields["max_tokens"] * len(prompts)))
        found = []
        for _ in range(turns):
            learner = self._learning.stats().get("learner_pid", 0)
            at_work = ask(self._learning, prompts, **self._fields)
            with stopped(learner):
                alone = ask(self._learning, prompts, **self._fields)
                static = ask(self._static, prompts, **self._fields)
            found.append(Speeds(at_work.speed, alone.speed, static.speed))
        return found


def run(options: argparse.Namespace, folder: Path) -> tuple[list[Mark], list[Speeds], dict[str, Any]]:
    """Runs the benchmark; returns the marks, the speeds, and the server's final report on its versions."""
    prompts = {name: prompts_of(name) for name in (*options.domain, OLD)}
    head = first_head(options, folder / "narrow")
    learn = {"dir": folder / "learning", "core_share": options.core_share, "max_load": 1000.0}
    # Trees of one shape: with adaptive drafting, the servers would choose different depths and rounds would not
    # compare.
    fixed = {"adaptive": False} | ({} if head is None else {"drafter": str(head)})
    if options.model is not None:
        fixed |= {"model": options.model, "max_model_len": MODEL_LEN, "suffix_beside": False}
    if options.chain is not None:
        fixed |= {"draft_steps": options.chain, "draft_top_k": 1, "verify_tree_size": options.chain + 1}
    with wingbeat_apps({"learning": AppConfig(learn=learn, **fixed), "static": AppConfig(**fixed)}) as apps:
        bench = Bench(apps, prompts, options)
        try:
            marks = [bench.mark(0.0)]
            print(marks[-1].line(), flush=True)
            while marks[-1].minutes < options.minutes:
                minutes = min(options.every, options.minutes - marks[-1].minutes)
                bench.traffic.go_for(60 * minutes, options.busy)
                marks.append(bench.mark(marks[-1].minutes + minutes))
                print(marks[-1].line(), flush=True)
        finally:
            bench.traffic.end()
        speeds = bench.speeds(options.domain, options.turns)
        return marks, speeds, drafter_of(apps["learning"]) | {"served_tokens": bench.traffic.num_tokens}


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_learning_options(parser, "learning_http", minutes=5.0, every=2.5, prompts=8)
    parser.add_argument("--model", help="a model in place of the demo's; needs the folder of its head in --head")
    parser.add_argument("--chain", type=int, help="draft chains of this length in place of trees")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of each answer")
    parser.add_argument("--busy", type=float, default=1.0, help="share of the time in which clients send requests")
    parser.add_argument("--turns", type=int, default=7, help="repeats of the speed measurement")
    options = parser.parse_args()
    if options.model is not None and options.head in ("demo", "narrow", "blank"):
        parser.error("--model needs the folder of its draft head in --head")
    if options.quick:
        options.minutes, options.every, options.prompts, options.turns, options.head_steps = 1.0, 0.5, 4, 1, 4
    with tempfile.TemporaryDirectory() as folder:
        marks, speeds, said = run(options, Path(folder))
    finish(options, marks, speeds, said)


if __name__ == "__main__":
    main()
