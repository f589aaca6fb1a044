"""Two verifiers on two drafters of a pool: one drafter is killed, and its verifier goes to the other and comes back."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
NUM_STREAMS = 8
LONG_TOKENS = 600


@pytest.fixture(scope="module")
def shared_app(start_app):
    """Trees are fixed: whether speculation pays on a busy machine is not the question."""
    with start_app("e2e-shared", num_replicas=2, drafters={"num": 2}, adaptive=False, drafter_timeout_s=2.0) as app:
        yield app


def pids(app) -> list[int]:
    """Process ids of the drafters that the engines have, 0 where one has none."""
    return sorted(e["drafter_pid"] if e["drafter_state"] == "attached" else 0 for e in app.engines().values())


def answer(app, index: int):
    """A request that is like no other; half of them sample."""
    prompt = f"def function_{index}(self, name):\n    "
    return app.complete(prompt, max_tokens=LONG_TOKENS, temperature=0.7 * (index % 2), seed=index)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_shared_drafter_lost_under_load_costs_nothing_but_speed(shared_app, until, process_exists, how):
    app = shared_app
    until(lambda: 0 not in pids(app) and len(set(pids(app))) == 2)
    before = pids(app)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        expected = [a.choices[0].text for a in threads.map(lambda i: answer(app, i), range(NUM_STREAMS))]
        running = [threads.submit(answer, app, index) for index in range(NUM_STREAMS)]
        until(lambda: all(engine["num_requests"] for engine in app.engines().values()))
        os.kill(before[0], how)
        until(lambda: pids(app) == [before[1]] * 2)
        answers = [one.result() for one in running]
    assert [a.choices[0].text for a in answers] == expected
    assert sum(a.metrics["speculative_decoding"]["num_drafts"] for a in answers) > 0
    until(lambda: not process_exists(before[0]))
    # Its successor takes one of the two over.
    until(lambda: 0 not in pids(app) and len(set(pids(app))) == 2, 120.0)
    assert answer(app, 0).choices[0].text == expected[0]
    for _ in range(4):
        app.check_integrity()


def test_an_application_whose_drafters_no_node_can_hold_serves_without_them(shared_app, start_app):
    options = {"num": 1, "start_timeout_s": 1.0}
    with start_app("e2e-unplaced", drafters=options, num_cpus_per_drafter=1000) as app:
        assert app.engine()["drafter_state"] == "none"
        assert not app.engine()["drafter_lacks_room"]
        prompt = "def read_config(path):\n    "
        assert app.text(prompt) == shared_app.text(prompt)
