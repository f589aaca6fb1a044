"""Other shapes of the application: two pairs behind one router, other drafters, a queue that is full."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
NUM_TOKENS = 240
LONG_TOKENS = 1200
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
    """What the single EAGLE pair answers."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda prompt: demo_app.text(prompt, max_tokens=NUM_TOKENS), PROMPTS))


@pytest.fixture(scope="module")
def narrow_app(start_app):
    """Plain decoding of one sequence at a time, and nobody may queue."""
    with start_app("e2e-plain", drafter="none", max_num_seqs=1, max_queued_requests=0) as app:
        yield app


def test_both_replicas_work_and_one_killed_with_its_requests_changes_no_text(
    start_app, expected, until, process_exists
):
    with start_app("e2e-two", num_replicas=2) as app, ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(lambda prompt: app.complete(prompt, max_tokens=NUM_TOKENS), PROMPTS))
        assert [answer.choices[0].text for answer in answers] == expected
        engines = app.engines()
        assert len(engines) == 2
        # Adaptive speculation has weighed every round; what it found depends on what else the machine does.
        assert all(sum(engine["policy"]["decisions"].values()) > 0 for engine in engines.values())

        # Long enough for both engines to be seen at work before one is killed.
        whole = list(threads.map(lambda prompt: app.text(prompt, max_tokens=LONG_TOKENS), PROMPTS))
        running = [threads.submit(app.text, prompt, max_tokens=LONG_TOKENS) for prompt in PROMPTS]
        until(lambda: all(engine["num_requests"] > 0 for engine in app.engines().values()))
        killed = next(iter(engines.values()))
        os.kill(killed["pid"], signal.SIGKILL)
        assert [answer.result() for answer in running] == whole
        until(lambda: not process_exists(killed["drafter_pid"]))


def test_plain_decoding_writes_what_the_eagle_pair_writes(narrow_app, expected):
    assert [narrow_app.text(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS[:4]] == expected[:4]
    assert narrow_app.engine()["drafter_pid"] == 0


def test_prompt_lookup_writes_what_the_eagle_pair_writes(start_app, expected):
    with start_app("e2e-ngram", drafter="ngram") as app, ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(lambda prompt: app.complete(prompt, max_tokens=NUM_TOKENS), PROMPTS))
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
