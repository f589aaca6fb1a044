"""A drafter that dies amid streams changes no text, and speculation comes back; of `tests/chaos` what is in the default
run."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
NUM_STREAMS = 8
BACK_WITHIN_S = 30.0
PAUSE_S = 1.5
"""Less than the application's patience with a drafter."""
PROBE = "import os\nimport sys\n\n\ndef main(argv=None):\n    "


class Stream:
    """A streamed completion, read to its end on a thread."""

    def __init__(self, app, index: int) -> None:
        self.app = app
        self.index = index
        self.begun = threading.Event()
        self.ended = False

    def read(self) -> tuple[str, str | None]:
        """Its text and finish reason. Half of the streams sample; all have lengths of their own."""
        text, finish = "", None
        chunks = self.app.complete(
            f"def function_{self.index}(self, name):\n    ",
            max_tokens=160 + 8 * self.index,
            temperature=0.7 * (self.index % 2),
            seed=self.index,
            stream=True,
        )
        for chunk in chunks:
            text += chunk.choices[0].text
            finish = chunk.choices[0].finish_reason
            self.begun.set()
        self.ended = True
        return text, finish


def read_all(app, disturb=lambda: None) -> list[tuple[str, str | None]]:
    """Texts and finish reasons of concurrent streams; `disturb` is called while all of them are under way."""
    streams = [Stream(app, index) for index in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        results = [threads.submit(stream.read) for stream in streams]
        for stream in streams:
            assert stream.begun.wait(120)
        assert not any(stream.ended for stream in streams), "too short to be disturbed"
        disturb()
        return [result.result() for result in results]


@pytest.fixture(scope="module")
def undisturbed(demo_app) -> list[tuple[str, str | None]]:
    return read_all(demo_app)


def test_a_drafter_that_stands_still_for_a_while_costs_plain_rounds_and_goes_on(demo_app, undisturbed, until):
    before = demo_app.engine()

    def pause() -> None:
        os.kill(before["drafter_pid"], signal.SIGSTOP)
        try:
            until(lambda: demo_app.engine()["drafter_state"] == "late", PAUSE_S)
        finally:
            os.kill(before["drafter_pid"], signal.SIGCONT)

    assert read_all(demo_app, pause) == undisturbed
    until(lambda: demo_app.engine()["drafter_state"] == "attached")
    after = demo_app.engine()
    assert after["drafter_incarnation"] == before["drafter_incarnation"]
    assert after["drafter_pid"] == before["drafter_pid"]
    demo_app.check_integrity()


def test_streams_are_unharmed_and_speculation_returns(demo_app, undisturbed, until, process_exists):
    before = demo_app.engine()
    usual = demo_app.complete(PROBE).metrics["speculative_decoding"]
    assert usual["num_drafts"] > 0
    assert before["drafter_state"] == "attached"

    disturbed = read_all(demo_app, lambda: os.kill(before["drafter_pid"], signal.SIGKILL))
    assert disturbed == undisturbed
    assert all(finish == "length" for _, finish in disturbed)

    def speculates_as_before() -> bool:
        metrics = demo_app.complete(PROBE).metrics["speculative_decoding"]
        return metrics["num_drafts"] > 0 and metrics["acceptance_length"] >= 0.8 * usual["acceptance_length"]

    until(speculates_as_before, BACK_WITHIN_S)
    after = demo_app.engine()
    assert after["drafter_incarnation"] > before["drafter_incarnation"]
    assert after["drafter_pid"] != before["drafter_pid"]
    assert after["pid"] == before["pid"], "the verifier itself must have survived"
    until(lambda: not process_exists(before["drafter_pid"]))
    demo_app.check_integrity()
