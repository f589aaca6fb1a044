"""Other shapes of the application: other drafters, a queue that is full; `tests/chaos` has those of several pairs."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from wingbeat.runtime.drafters.choice import FALLBACK

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
NUM_TOKENS = 240
PROMPTS = [
    "def read_config(path):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "for name in sorted(os.listdir(path)):\n    ",
    "    def __repr__(self):\n        return ",
    "import os\nimport sys\n\n\n",
    "class ServerError(Exception):\n    ",
    "    for index, value in enumerate(values):\n        ",
    "def test_round_trip(self):\n        ",
]


@pytest.fixture(scope="module")
def expected(demo_app) -> list[str]:
    """Texts of a single EAGLE pair."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda prompt: demo_app.text(prompt, max_tokens=NUM_TOKENS), PROMPTS))


@pytest.fixture(scope="module")
def narrow_app(start_app):
    """Plain decoding of one sequence at a time, and nobody may queue."""
    with start_app("e2e-plain", drafter="none", max_num_seqs=1, max_queued_requests=0) as app:
        yield app


def test_plain_decoding_writes_what_the_eagle_pair_writes(narrow_app, expected):
    assert [narrow_app.text(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS[:4]] == expected[:4]
    assert narrow_app.engine()["drafter_pid"] == 0


def test_prompt_lookup_writes_what_the_eagle_pair_writes(start_app, expected):
    with start_app("e2e-ngram", drafter=FALLBACK.kind) as app, ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(lambda prompt: app.complete(prompt, max_tokens=NUM_TOKENS), PROMPTS))
    assert [answer.choices[0].text for answer in answers] == expected
    assert sum(answer.metrics["speculative_decoding"]["num_drafts"] for answer in answers) > 0


def test_a_drafter_within_the_engine_writes_what_the_eagle_pair_writes(start_app, expected, until):
    with (
        start_app("e2e-inner", drafter_place="engine", adaptive=False) as app,
        ThreadPoolExecutor(len(PROMPTS)) as threads,
    ):
        before = app.engine()
        answers = list(threads.map(lambda prompt: app.complete(prompt, max_tokens=NUM_TOKENS), PROMPTS))
        assert (before["drafter_state"], before["drafter_pid"]) == ("attached", before["engine_pid"])
        os.kill(before["drafter_pid"], signal.SIGKILL)
        assert app.text(PROMPTS[0], max_tokens=NUM_TOKENS) == expected[0]
        after = app.engine()
        assert after["engine_pid"] != before["engine_pid"]
        assert after["drafter_state"] == "attached"
    assert [answer.choices[0].text for answer in answers] == expected
    assert sum(answer.metrics["speculative_decoding"]["num_drafts"] for answer in answers) > 0


def test_overload_is_503_with_retry_after_which_the_client_follows(narrow_app):
    with narrow_app.complete(PROMPTS[0], max_tokens=1500, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.InternalServerError) as refused:
            narrow_app.complete(PROMPTS[1])
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        assert refused.value.body["code"] == "engine_overloaded"
        with pytest.raises(openai.InternalServerError) as refused:
            narrow_app.complete(PROMPTS[1], stream=True)
        assert refused.value.status_code == 503
    patient = narrow_app.client.with_options(max_retries=20)
    assert narrow_app.complete(PROMPTS[1], client=patient).choices[0].finish_reason == "length"


def test_a_router_that_hangs_holds_up_no_engine(narrow_app):
    from ray import serve

    from wingbeat.deployments.replica.verifier_replica import LEASE_S

    title = f"ray::ServeReplica:{narrow_app.name}:Router".encode()
    (router,) = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if title in path.read_bytes()]
    handle = serve.get_deployment_handle("Verifier", narrow_app.name)
    with narrow_app.complete(PROMPTS[0], max_tokens=1500, stream=True) as stream:
        next(iter(stream))
        os.kill(router, signal.SIGSTOP)
        try:
            hung_until = time.monotonic() + LEASE_S + 5
            while time.monotonic() < hung_until:
                stats = handle.stats.remote().result(timeout_s=5.0)
                time.sleep(0.5)
        finally:
            os.kill(router, signal.SIGCONT)
    assert stats["num_requests"] == 0, "those of a router that is silent are aborted"
    # Its router finds its engine again within a lease.
    until = time.monotonic() + LEASE_S
    while (health := narrow_app.http.get("/health")).is_error and time.monotonic() < until:
        time.sleep(0.1)
    health.raise_for_status()
    # Its router may still count what was aborted while it hung: a 503 then says when to come again.
    patient = narrow_app.client.with_options(max_retries=5)
    assert narrow_app.complete(PROMPTS[1], patient, max_tokens=4).choices[0].text
