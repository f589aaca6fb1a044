"""The real application with the demo pair, started once, and what tests need to talk to it and to look into it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

MODEL = "wingbeat-demo"
STATS_TIMEOUT_S = 60.0


class App:
    """A running application: its clients, its engines' figures."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.client = openai.OpenAI(base_url=f"{url}/{name}/v1", api_key="none", max_retries=0, timeout=300)
        self.http = httpx.Client(base_url=f"{url}/{name}", timeout=60)

    def complete(self, prompt: Any, client: openai.OpenAI | None = None, **fields: Any) -> Any:
        """A completion, 48 tokens and greedy unless the fields say otherwise; extensions go in `extra`."""
        extra = {"ignore_eos": True, **fields.pop("extra", {})}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0, **fields}
        return (client or self.client).completions.create(**body, extra_body=extra)

    def text(self, prompt: Any, **fields: Any) -> str:
        """The text of a completion's first choice."""
        return self.complete(prompt, **fields).choices[0].text

    def engines(self) -> dict[str, dict[str, Any]]:
        """Stats by engine id; asks until each running engine has answered."""
        from ray import serve

        handle = serve.get_deployment_handle("Verifier", self.name)
        states = serve.status().applications[self.name].deployments["Verifier"].replica_states
        found: dict[str, dict[str, Any]] = {}
        for _ in range(200):
            stats = handle.stats.remote().result(timeout_s=STATS_TIMEOUT_S)
            found[stats["engine_id"]] = stats
            if len(found) >= states.get("RUNNING", 0):
                break
        return found

    def engine(self) -> dict[str, Any]:
        """Stats of the only engine."""
        (stats,) = self.engines().values()
        return stats

    def check_integrity(self) -> None:
        """Raises where an engine's KV blocks do not add up."""
        from ray import serve

        serve.get_deployment_handle("Verifier", self.name).check_integrity.remote().result(timeout_s=STATS_TIMEOUT_S)

    def close(self) -> None:
        """Close the clients."""
        self.client.close()
        self.http.close()


@contextmanager
def running(name: str, url: str, **args: Any) -> Iterator[App]:
    """The application of these arguments, for as long as the block lasts."""
    from ray import serve

    from wingbeat.deployments.app import build
    from wingbeat.deployments.config import AppConfig

    serve.run(build(AppConfig(**args)), name=name, route_prefix=f"/{name}")
    app = App(name, url)
    try:
        yield app
    finally:
        app.close()
        serve.delete(name)


@pytest.fixture(scope="session")
def eagle_app(ray_cluster: str) -> Iterator[App]:
    """The demo pair with its EAGLE head; a stuck drafter is noticed sooner than `make serve` does.

    Trees are fixed: on a machine busy with tests the measured costs may well say that speculation does not pay.
    """
    with running("e2e-eagle", ray_cluster, drafter_timeout_s=2.0, adaptive=False) as app:
        yield app


@pytest.fixture(scope="session")
def start_app(ray_cluster: str) -> Callable[..., Any]:
    """Starts another application: `with start_app(name, **args) as app`."""
    return lambda name, **args: running(name, ray_cluster, **args)


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Waits for a condition: `until(condition, timeout_s)`."""

    def wait(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.1)

    return wait


@pytest.fixture(scope="session")
def process_exists() -> Callable[[int], bool]:
    """Whether a process is there and not a zombie."""

    def exists(pid: int) -> bool:
        try:
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (ProcessLookupError, FileNotFoundError):
            return False

    return exists
