"""An application under a load of clients, whose alerts a real Prometheus evaluates, minutes read as seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import openai

from tests.deployments.metrics.alert_rules import in_seconds
from tests.deployments.metrics.prometheus_server import Prometheus
from tests.ports import free_port

MOST_CLIENTS = 64
FIRES_WITHIN_S = 240.0
PROMPTS = ("def read(path):\n    ", "class Stack:\n    def __init__(self):\n        ", "import os\nimport sys\n\n\n")


class Watched:
    """The application, its clients and the alerts; use as a context manager, whose end ends the clients.

    Args:
        fields: of each request.
    """

    def __init__(self, app: Any, prometheus: Prometheus, fields: dict[str, Any]) -> None:
        self.app, self._prometheus, self._fields = app, prometheus, fields
        self.num_answers = self.num_errors = 0
        self._done = threading.Event()
        self._threads = ThreadPoolExecutor(MOST_CLIENTS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._threads.shutdown()

    def ask(self, num_clients: int) -> None:
        """Begin so many more clients, each of which asks one request after another."""
        for _ in range(num_clients):
            self._threads.submit(self._run)

    def fired(self) -> set[str]:
        """Names of the alerts that have fired so far."""
        return self._prometheus.fired()

    def said(self) -> str:
        """Answers and the engine's rounds so far, for people."""
        stats = self.app.engine()
        drafted, plain = stats["speculation"], sum(stats["plain_rounds"].values())
        length = 1 + drafted["num_accepted_tokens"] / max(drafted["num_drafts"], 1)
        policy = "" if stats["policy"] is None else f", break-even {stats['policy']['break_even']}"
        rounds = f"{plain} plain rounds of {stats['phases']['num_rounds']}"
        return f"{self.num_answers} answers, {length:.2f} tokens per draft{policy}, {rounds}"

    def wait_for(self, *alerts: str) -> None:
        """Until these have fired."""
        self.until(lambda: set(alerts) <= self.fired(), every_s=0.5)

    def until(self, condition: Callable[[], Any], every_s: float = 0.2) -> None:
        """Wait for a condition; raises AssertionError with the alerts so far where it never comes true."""
        deadline = time.monotonic() + FIRES_WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.said()}; fired: {self.fired()}"
            time.sleep(every_s)

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self.app.complete(PROMPTS[self.num_answers % len(PROMPTS)], **self._fields)
                self.num_answers += 1
            except openai.APIError:
                self.num_errors += 1
                self._done.wait(0.1)


@contextmanager
def watched(start_app: Any, name: str, folder: Path, fields: dict[str, Any], **settings: Any) -> Iterator[Watched]:
    """Start all three."""
    with start_app(name, **settings) as app:
        url = httpx.URL(app.http.base_url)
        target, rules = f"{url.host}:{url.port}", in_seconds(folder)
        with (
            Prometheus(target, free_port(), f"/{name}/metrics", rules) as prometheus,
            Watched(app, prometheus, fields) as world,
        ):
            # A Prometheus that has just started finds its targets after some seconds: rises before them are not seen.
            world.until(prometheus.names)
            yield world
