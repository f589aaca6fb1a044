"""Weights that are pushed under load, in the real application: what is written by which, and what survives."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.conftest import MODEL, App
from tests.e2e.greedy_texts import BEHIND, PREFIX, PROMPTS, generated, text, texts
from tests.runtime.pushed_folder import edit, pushed_folder, rewrite, tensors
from tests.small_verifiers import save_hybrid, save_two_kv_heads
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.choice import FALLBACK
from wingbeat.runtime.verifier.checkpoints.digests import weights_digest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]
NUM_CLIENTS = 3


def cached(app: App, prompt: str) -> int:
    usage = app.complete(prompt, max_tokens=1).usage
    return usage.prompt_tokens_details.cached_tokens


def push(app: App, folder: Path, status: int = 200) -> dict:
    answer = app.http.post("/v1/weights/update", json={"folder": str(folder)}, timeout=300)
    assert answer.status_code == status, answer.text
    return answer.json()


def weights_of_all(app: App, num_replicas: int) -> set[str]:
    """Digests of the weights that the replicas serve; empty while a replica has no engine."""
    try:
        engines = app.engines().values()
    except EngineFailed:
        return set()
    return {engine["weights"] for engine in engines} if len(engines) == num_replicas else set()


@contextmanager
def traffic(app: App) -> Iterator[list[list[str]]]:
    """Clients for as long as the block lasts; every answer is noted, and none fails."""
    answers, over = [], threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(texts(app))

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(ask) for _ in range(NUM_CLIENTS)]
        try:
            yield answers
        finally:
            over.set()
        for client in clients:
            client.result()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_weights_pushed_under_load_lose_no_request_and_nothing_of_the_old_ones_is_read(
    start_app, tmp_path: Path, until, num_replicas: int
):
    folder, digest = pushed_folder(tmp_path / "step-1"), weights_digest(tmp_path / "step-1")
    (*old, old_behind), (*new, new_behind) = generated(demo_pair().verifier), generated(folder)
    assert all(one != other for one, other in zip(old, new, strict=True))
    not_finite = shutil.copytree(folder, tmp_path / "step-2")
    rewrite(not_finite, {name: held * (torch.nan if "norm" in name else 1) for name, held in tensors(folder).items()})
    other_size = shutil.copytree(folder, tmp_path / "step-3")
    edit(other_size, "config.json", intermediate_size=12)
    settings = {"num_replicas": num_replicas, "prefix_dir": tmp_path / "prefixes", "adaptive": False}
    with start_app(f"weights-{num_replicas}", **settings) as app:
        fingerprint = app.complete(PROMPTS[0], max_tokens=1).system_fingerprint
        saved = app.http.post("/v1/prefixes", json={"name": "begin", "prompt": PREFIX}, timeout=120)
        assert saved.status_code == 200, saved.text
        assert text(app, BEHIND, prefix="begin") == old_behind
        assert texts(app) == old
        cached(app, PROMPTS[1] * 4)
        assert cached(app, PROMPTS[1] * 4) > 0
        restarts = sum(engine["num_engine_restarts"] for engine in app.engines().values())

        # Weights that do not fit change nothing; weights with which no engine starts are taken back.
        error = push(app, other_size, 400)["error"]
        assert (error["param"], "intermediate_size is 12" in error["message"]) == ("folder", True)
        with traffic(app) as answers:
            error = push(app, not_finite, 400)["error"]
        assert "NaN" in error["message"]
        assert "the former checkpoint is served again" in error["message"]
        assert {*map(tuple, answers)} == {tuple(old)}
        assert texts(app) == old

        with traffic(app) as answers:
            card = push(app, folder)
            pushed_at = len(answers)
            until(lambda: len(answers) > pushed_at + 2 * NUM_CLIENTS)
        assert (card["weights"], card["folder"], len(card["engines"])) == (digest, str(folder), num_replicas)
        # Each text is of one weights; behind the push none is of the old ones.
        seen = {(at, one) for row in answers for at, one in enumerate(row)}
        assert seen <= {(at, one) for row in (old, new) for at, one in enumerate(row)}
        assert answers[-1] == texts(app) == new
        for prompt in PROMPTS:
            assert text(app, prompt, speculation={"enabled": False}) == new[PROMPTS.index(prompt)]
        assert text(app, BEHIND, prefix="begin") == new_behind != old_behind
        assert cached(app, PROMPTS[1] * 4) == 0, "a prefix was read that the old weights computed"
        engines = app.engines()
        assert {engine["weights"] for engine in engines.values()} == {digest}
        cards = app.http.get("/v1/weights").json()["data"][0]["engines"].values()
        (told,) = {card["system_fingerprint"] for card in cards}
        assert told == app.complete(PROMPTS[0], max_tokens=1).system_fingerprint != fingerprint
        assert all(engine["drafter_state"] == "attached" for engine in engines.values())
        assert sum(engine["num_engine_restarts"] for engine in engines.values()) == restarts + 1, "that of the NaNs"
        assert f'weights="{digest}"' in app.http.get("/metrics").text

        # An engine, and a replica, that come back come back with what was pushed.
        with traffic(app) as answers:
            os.kill(next(iter(engines.values()))["engine_pid"], signal.SIGKILL)
            until(lambda: len(answers) > 2 * NUM_CLIENTS)
        assert {*map(tuple, answers)} == {tuple(new)}
        until(lambda: weights_of_all(app, num_replicas) == {digest}, 120)
        os.kill(app.engines().popitem()[1]["pid"], signal.SIGKILL)
        assert texts(app) == new
        until(lambda: weights_of_all(app, num_replicas) == {digest}, 120)
        assert app.complete(PROMPTS[0], model=MODEL).usage.completion_tokens == 48
        app.check_integrity()
        # The folder of the settings is one to push as any other.
        push(app, demo_pair().verifier)
        assert texts(app) == old


@pytest.mark.parametrize("kind", ["ranks", "shared drafters", "within the engine", "recurrent state"])
def test_so_are_those_of_other_pairs(start_app, tmp_path: Path, kind: str):
    settings = {
        "ranks": {"tensor_parallel_size": 2, "drafter": FALLBACK.kind, "model": tmp_path / "model"},
        "shared drafters": {"drafters": {"num": 1}},
        "within the engine": {"drafter_place": "engine"},
        "recurrent state": {"drafter": FALLBACK.kind, "model": tmp_path / "model"},
    }[kind]
    if kind == "ranks":
        save_two_kv_heads(tmp_path / "model")
    elif kind == "recurrent state":
        save_hybrid(tmp_path / "model")
    folder = pushed_folder(tmp_path / "step-1", settings.get("model"))
    with start_app(f"weights-{kind.replace(' ', '-')}", served_model_name=MODEL, **settings) as app:
        before = texts(app)
        push(app, folder)
        assert texts(app) == generated(folder)[:3] != before
        os.kill(app.engine()["engine_pid"], signal.SIGKILL)
        assert texts(app) == generated(folder)[:3]
        assert app.engine()["drafter_state"] == "attached"
