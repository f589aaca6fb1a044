"""A real EAGLE pair whose replicas come and go under load: nothing is lost, and no text changes."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import App

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]
NUM_TOKENS = 96
PROMPTS = [f"def function_{index}(self, name):\n    " * (1 + index % 3) for index in range(6)]
LIMITS: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 64, "max_num_seqs": 2, "adaptive": False}
QUICK = {
    "max_replicas": 3,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 4.0,
    "policy": {"policy_kwargs": {"target_queue_s": 0.3}},
}
CHANGE_S = 240.0


@pytest.fixture(scope="module")
def expected(start_app) -> list[str]:
    """Texts of a pair that stays up."""
    with start_app("steady", **LIMITS) as app:
        return [app.text(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]


class Clients:
    """Streams over and over; holds every text against the one that it should be."""

    def __init__(self, app: App, expected: list[str]) -> None:
        self._app, self._expected, self._over = app, expected, threading.Event()
        self.first_token_s: list[tuple[float, float]] = []
        """(when it was asked, how long the first token took)."""

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """So many of them, for as long as the block lasts; every request is answered before it ends."""
        self._over.clear()
        with ThreadPoolExecutor(number) as threads:
            clients = [threads.submit(self._ask, index) for index in range(number)]
            try:
                yield
            finally:
                self._over.set()
            for client in clients:
                client.result()

    def _ask(self, index: int) -> None:
        while not self._over.is_set():
            index, asked, texts = (index + 1) % len(PROMPTS), time.monotonic(), []
            for chunk in self._app.complete(PROMPTS[index], max_tokens=NUM_TOKENS, stream=True):
                if not texts:
                    self.first_token_s.append((asked, time.monotonic() - asked))
                texts += [choice.text for choice in chunk.choices]
            assert "".join(texts) == self._expected[index]


def num_running(app: App) -> tuple[int, int]:
    """Replicas that run, and others."""
    from ray import serve

    states = serve.status().applications[app.name].deployments["Verifier"].replica_states
    return states.get("RUNNING", 0), sum(states.values()) - states.get("RUNNING", 0)


def play(app: App, clients: Clients, until: Callable[..., None], steps: tuple[tuple[int, int], ...]) -> None:
    """Each step: so many clients, and the number of replicas that they bring."""
    for number, replicas in steps:
        began = time.monotonic()
        if number:
            with clients.running(number):
                until(lambda replicas=replicas: num_running(app) == (replicas, 0), CHANGE_S)
        else:
            until(lambda replicas=replicas: num_running(app) == (replicas, 0), CHANGE_S)
        longest = max((seconds for asked, seconds in clients.first_token_s if asked >= began), default=0.0)
        print(f"{number} clients: {replicas} replicas after {time.monotonic() - began:.1f} s; longest wait for a first")
        print(f"  token {longest:.2f} s; {len(clients.first_token_s)} requests so far")


def test_from_none_to_three_and_back_under_load(start_app, until, expected):
    scaling = {**QUICK, "min_replicas": 0, "downscale_to_zero_delay_s": 4.0}
    with start_app("eagle-scales", autoscaling_config=scaling, **LIMITS) as app:
        clients = Clients(app, expected)
        play(app, clients, until, ((0, 0), (1, 1), (12, 3), (1, 1), (0, 0)))
        waking = clients.first_token_s[0][1]
        print(f"first token of the request that woke the first replica: {waking:.2f} s")
        assert app.http.get("/health").status_code == 200
        with clients.running(1):
            until(lambda: num_running(app)[0] == 1, CHANGE_S)
        assert app.engine()["speculation"]["num_accepted_tokens"] > 0
