"""A head that learns while it serves, on text that it was not trained for, beside the same head that does not.

    .venv/bin/python benchmarks/learning.py [--domain NAME] [--minutes N] [--quick] [--output FILE]

Two servers of the demo pair on this machine, with fixed trees: one learns, one is static. Clients ask the learning one
for completions of text of a new domain: C headers, HTML of the standard library's documentation, JSON logs, or English
of licences and READMEs, all made here. At every mark both servers complete the same held-out prompts (which nobody may
learn from), of the new domain and of Python, the old one, in turn; texts must be equal. Speed while learning is that of
the learning server with the learner at work, over that with the learner's process stopped, in turn.
"""

import argparse
import hashlib
import json
import os
import pydoc
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from report import Report, Table, machine_facts, middle, model_facts
from servers import App, wingbeat_apps

from wingbeat.deployments.app_config import AppConfig

PROMPT_CHARS, MOST_CHARS = 240, 40_000
TOKENS, CLIENTS = 96, 4
HELD_OUT = 0.1
"""Of a domain's files: whose text is never asked for but at a mark."""
MODULES = ("json", "email", "http.client", "argparse", "logging", "asyncio", "unittest", "socket", "decimal", "csv")


class Asked(NamedTuple):
    """What completions of the same prompts came to."""

    texts: list[str]
    length: float
    """Tokens per round with a tree."""
    speed: float
    """Tokens per second."""


class Mark(NamedTuple):
    """One look at both servers."""

    minutes: float
    version: int
    new: tuple[float, float]
    """Tokens per round on the new domain, learning and static."""
    old: tuple[float, float]
    speed: float
    """With the learner at work, over that without it."""
    over_static: float
    """Tokens per second on the new domain, over the static server's."""


def files_of(root: Path, *patterns: str) -> Iterator[str]:
    """Texts of files below a folder."""
    for pattern in patterns:
        for path in sorted(root.rglob(pattern)):
            if path.is_file():
                yield path.read_text(encoding="utf-8", errors="ignore")[:MOST_CHARS]


def html() -> Iterator[str]:
    """Documentation of the standard library as pydoc writes it."""
    for name in MODULES:
        page = pydoc.HTMLDoc().document(pydoc.locate(name))
        yield from (page[begin : begin + 4000] for begin in range(0, min(len(page), 10 * MOST_CHARS), 4000))


def json_logs() -> Iterator[str]:
    """Lines of a service's log, drawn with a fixed seed."""
    rng = random.Random(7)
    paths, levels = ("/v1/orders", "/v1/users/{}", "/health", "/v1/carts/{}/items"), ("INFO", "INFO", "INFO", "WARNING")
    for file in range(200):
        lines, now = [], 1_700_000_000 + 3600 * file
        for _ in range(40):
            now += rng.randrange(1, 9)
            path = rng.choice(paths).format(rng.randrange(1000, 9999))
            status = rng.choice((200, 200, 200, 201, 404, 500))
            fields = {"ts": now, "level": rng.choice(levels), "service": "shop", "method": rng.choice(("GET", "POST"))}
            fields |= {"path": path, "status": status, "duration_ms": rng.randrange(1, 400), "trace": f"{file:04x}"}
            lines.append(json.dumps(fields))
        yield "\n".join(lines)


def english() -> Iterator[str]:
    """Licences and READMEs of the packages that are installed."""
    yield from files_of(Path(sys.prefix), "LICENSE*", "README*.md", "METADATA")
    yield from files_of(Path("/usr/share/doc"), "copyright")


DOMAINS: dict[str, Callable[[], Iterator[str]]] = {
    "c": lambda: files_of(Path("/usr/include"), "*.h"),
    "html": html,
    "json": json_logs,
    "english": english,
}


def python() -> Iterator[str]:
    """What the demo pair was trained on."""
    yield from files_of(Path(os.__file__).parent, "[a-m]*.py")


def prompts_of(texts: Iterator[str]) -> tuple[list[str], list[str]]:
    """Pieces of texts to be completed: those to serve, and those of held-out files."""
    served: list[str] = []
    held: list[str] = []
    for text in texts:
        is_held = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") < HELD_OUT * 2**32
        pieces = [text[at : at + PROMPT_CHARS] for at in range(0, len(text) - PROMPT_CHARS, 3 * PROMPT_CHARS)]
        (held if is_held else served).extend(pieces)
    rng = random.Random(1)
    rng.shuffle(served)
    rng.shuffle(held)
    return served, held


def complete(app: App, prompt: str, **fields: Any) -> dict[str, Any]:
    """One completion."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | fields
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{app.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def ask(app: App, prompts: list[str]) -> Asked:
    """Completions of prompts, four at once; nobody learns from them."""
    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda prompt: complete(app, prompt, speculation={"learn": False}), prompts))
    seconds = time.monotonic() - began
    drafted = [answer["metrics"]["speculative_decoding"] for answer in answers]
    rounds = sum(one["num_drafts"] for one in drafted)
    accepted = sum(one["num_accepted_tokens"] for one in drafted)
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return Asked([answer["choices"][0]["text"] for answer in answers], 1 + accepted / max(1, rounds), tokens / seconds)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process does nothing while the block lasts."""
    if pid:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if pid:
            os.kill(pid, signal.SIGCONT)


def look(apps: dict[str, App], held: tuple[list[str], list[str]], minutes: float, repeats: int) -> Mark:
    """Both servers on the same prompts, in turn."""
    learning, static = apps["learning"], apps["static"]
    pid = learning.stats().get("learner_pid", 0)
    ratios, over_static = [], []
    for _ in range(repeats):
        with_learner = ask(learning, held[0])
        with stopped(pid):
            without, still = ask(learning, held[0]), ask(static, held[0])
        ratios.append(with_learner.speed / without.speed)
        over_static.append(with_learner.speed / still.speed)
        if not with_learner.texts == without.texts == still.texts:
            raise SystemExit("the text depends on who drafts")
    with stopped(pid):
        old, old_still = ask(learning, held[1]), ask(static, held[1])
    version = learning.stats()["head_version"]
    new = (with_learner.length, still.length)
    return Mark(minutes, version, new, (old.length, old_still.length), middle(ratios), middle(over_static))


class Traffic:
    """Clients that ask one server for completions of a domain, for as long as they are not held."""

    def __init__(self, app: App, prompts: list[str]) -> None:
        self._app, self._prompts = app, prompts
        self._goes, self._done = threading.Event(), False
        self._busy = threading.Semaphore(CLIENTS)
        self.num_tokens = 0
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        for turn in range(10**9):
            self._goes.wait()
            if self._done:
                return
            prompt = self._prompts[(turn * CLIENTS + index) % len(self._prompts)]
            with self._busy:
                answer = complete(self._app, prompt)
            self.num_tokens += answer["usage"]["completion_tokens"]

    def go_for(self, seconds: float) -> None:
        """Ask for so long, and wait for the answers."""
        self._goes.set()
        time.sleep(seconds)
        self._goes.clear()
        for _ in range(CLIENTS):
            self._busy.acquire()
        for _ in range(CLIENTS):
            self._busy.release()

    def end(self) -> None:
        """Let the clients go."""
        self._done = True
        self._goes.set()
        for thread in self._threads:
            thread.join()


def run(options: argparse.Namespace) -> tuple[list[Mark], dict[str, Any]]:
    """The marks, and what the server says of its versions at the end."""
    served, held = prompts_of(DOMAINS[options.domain]())
    _, held_old = prompts_of(python())
    sets = held[: options.prompts], held_old[: options.prompts]
    with tempfile.TemporaryDirectory() as folder:
        learn = {"dir": folder, "core_share": options.core_share, "max_load": 1000.0}
        # Trees of one shape: otherwise each server drafts as deep as it finds worth it, and rounds are of two kinds.
        apps_of = {"learning": AppConfig(learn=learn, adaptive=False), "static": AppConfig(adaptive=False)}
        with wingbeat_apps(apps_of) as apps:
            traffic = Traffic(apps["learning"], served)
            try:
                marks = [look(apps, sets, 0.0, options.repeats)]
                show(marks[-1])
                while marks[-1].minutes < options.minutes:
                    minutes = min(options.every, options.minutes - marks[-1].minutes)
                    traffic.go_for(60 * minutes)
                    marks.append(look(apps, sets, marks[-1].minutes + minutes, options.repeats))
                    show(marks[-1])
            finally:
                traffic.end()
            with urllib.request.urlopen(f"{apps['learning'].url}/v1/drafter", timeout=60) as answer:
                return marks, json.load(answer) | {"served_tokens": traffic.num_tokens}


def show(mark: Mark) -> None:
    """One line."""
    words = (
        f"{mark.minutes:5.1f} min: version {mark.version}",
        f"new domain {mark.new[0]:.3f} ({mark.new[1]:.3f} static)",
        f"old {mark.old[0]:.3f} ({mark.old[1]:.3f})",
        f"speed with the learner {mark.speed:.2f}, over static {mark.over_static:.2f}",
    )
    print(", ".join(words), flush=True)


def table_of(marks: list[Mark], domain: str) -> Table:
    """Over time."""
    rows = [
        (
            f"{mark.minutes:g} min",
            str(mark.version),
            f"{mark.new[0]:.3f}",
            f"{mark.new[1]:.3f}",
            f"{mark.new[0] / mark.new[1] - 1:+.1%}",
            f"{mark.old[0] / mark.old[1] - 1:+.1%}",
            f"{mark.speed:.2f}",
            f"{mark.over_static:.2f}",
        )
        for mark in marks
    ]
    columns = ("traffic", "version", "tokens per round", "static", "gain", "gain on Python")
    columns += ("speed with the learner at work", "speed over static")
    note = "Tokens per round with a tree, held-out prompts, greedy, four at once; speeds are ratios of medians."
    return Table(f"Learning on {domain}", columns, rows, note)


def main() -> None:
    """Measure, show and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--domain", choices=DOMAINS, default="c")
    parser.add_argument("--minutes", type=float, default=30.0, help="of traffic")
    parser.add_argument("--every", type=float, default=5.0, help="minutes between two marks")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts of each domain at a mark")
    parser.add_argument("--repeats", type=int, default=3, help="of the speeds at a mark")
    parser.add_argument("--core-share", type=float, default=0.5, help="of one core, for the learner")
    parser.add_argument("--quick", action="store_true", help="two minutes")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.every, options.prompts, options.repeats = 2.0, 1.0, 8, 1
    marks, drafter = run(options)
    config = AppConfig()
    facts = machine_facts() | model_facts(config.model_dir(), config.choice().source)
    facts["learner"] = json.dumps({name: drafter["learner"][name] for name in ("steps", "seconds", "samples")})
    figures = {"marks": [mark._asdict() for mark in marks], "drafter": drafter}
    report = Report("Learning while serving", facts, [table_of(marks, options.domain)], figures)
    report.finish(options, "learning")


if __name__ == "__main__":
    main()
