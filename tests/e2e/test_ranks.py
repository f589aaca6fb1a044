"""Verifiers over two ranks behind the router: their texts, and what becomes of requests when a rank is killed."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import MODEL
from tests.small_verifiers import save_two_kv_heads
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.runtime.drafters.choice import FALLBACK

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
PROMPTS = ["def read_config(path):\n    ", "class Stack:\n    def __init__(self):\n        ", "import os\nimport sys\n"]
LENGTH = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a verifier that two ranks divide, and the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("two-kv-heads")
    save_two_kv_heads(folder)
    return folder


def restarts(app):
    """Number of restarts of each engine; None while an engine is being started."""
    try:
        return sorted(engine["num_engine_restarts"] for engine in app.engines().values())
    except EngineFailed:
        return None


def test_a_killed_rank_changes_no_text_and_leaves_no_process(start_app, model, until, process_exists):
    settings = {"model": model, "served_model_name": MODEL, "drafter": FALLBACK.kind, "adaptive": False}
    fields = [{"max_tokens": LENGTH, "temperature": index / 2, "seed": index} for index in range(len(PROMPTS))]
    with (
        ThreadPoolExecutor(len(PROMPTS)) as threads,
        start_app("e2e-ranks", num_replicas=2, tensor_parallel_size=2, **settings) as app,
    ):
        expected = list(threads.map(lambda prompt, own: app.text(prompt, **own), PROMPTS, fields))
        running = [threads.submit(app.text, prompt, **own) for prompt, own in zip(PROMPTS, fields, strict=True)]
        until(lambda: any(engine["num_requests"] for engine in app.engines().values()))
        killed = next(engine for engine in app.engines().values() if engine["num_requests"])
        os.kill(killed["rank_pids"][0], signal.SIGKILL)
        assert [answer.result() for answer in running] == expected
        until(lambda: not process_exists(killed["engine_pid"]))
        until(lambda: restarts(app) == [0, 1])
        other = next(engine for engine in app.engines().values() if not engine["num_engine_restarts"])
        os.kill(other["rank_pids"][0], signal.SIGKILL)  # of an engine that has nothing to do
        until(lambda: restarts(app) == [1, 1])
        assert app.text(PROMPTS[0], **fields[0]) == expected[0]
        engines = app.engines().values()
        os.kill(next(iter(engines))["engine_pid"], signal.SIGKILL)
        until(lambda: not process_exists(next(iter(engines))["rank_pids"][0]))
        until(lambda: restarts(app) == [1, 2])
        last = [pid for engine in app.engines().values() for pid in engine["rank_pids"]]
        assert len(last) == 2
        app.check_integrity()
    until(lambda: not any(map(process_exists, last)))
