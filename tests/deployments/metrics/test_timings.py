"""Times and acceptance in an answer, under the names that benchmarks read."""

import pytest

from tests.deployments.http_world import FakePool, chunks, complete
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.metrics.timings import Timings
from wingbeat.runtime.metrics import SpeculationMetrics

TIMINGS = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


class Clock:
    """A clock in seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def timed(num_choices: int, *events: tuple[float, int, int]) -> dict:
    """Timings of events (second, choice, tokens)."""
    clock = Clock()
    timings = Timings(num_choices, clock)
    for second, index, num_tokens in events:
        clock.now = 10.0 + second
        timings.add(index, num_tokens, 0.05 if num_tokens == 1 else 0.0)
    return timings.as_dict()


def test_times_run_from_the_arrival():
    got = timed(1, (0.2, 0, 1), (0.4, 0, 3), (0.6, 0, 2), (0.9, 0, 0))
    assert got == pytest.approx(
        {
            "time_to_first_token_ms": 200,
            "generation_time_ms": 400,
            "queue_time_ms": 50,
            "mean_itl_ms": 80,
            "tokens_per_second": 10,
        }
    )


def test_choices_run_side_by_side():
    got = timed(2, (0.1, 0, 1), (0.2, 1, 1), (0.5, 0, 4), (1.0, 1, 4))
    assert got["time_to_first_token_ms"] == pytest.approx(100)
    assert got["generation_time_ms"] == pytest.approx(900)
    assert got["mean_itl_ms"] == pytest.approx(1e3 * (0.4 + 0.8) / 8)
    assert got["tokens_per_second"] == pytest.approx(10)


def test_what_cannot_be_divided_is_null():
    assert timed(1, (0.1, 0, 1))["mean_itl_ms"] is None
    assert set(timed(1, (0.1, 0, 0)).values()) == {None}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_carries_both_objects(stream):
    pool = FakePool()
    pool.info = ModelInfo("demo", 64, 257, num_spec_tokens=3)
    response = complete(pool, stream=stream, stream_options={"include_usage": True} if stream else None)
    metrics = chunks(response)[-1]["metrics"] if stream else response.json()["metrics"]
    assert set(metrics) == {"speculative_decoding", *TIMINGS}
    assert metrics["queue_time_ms"] == 250
    speculation = metrics["speculative_decoding"]
    assert (speculation["num_spec_steps"], speculation["num_spec_tokens"]) == (2, 3)
    assert (speculation["num_draft_tokens"], speculation["num_accepted_draft_tokens"]) == (6, 3)
    assert (speculation["mean_acceptance_length"], speculation["draft_acceptance_rate"]) == (2.5, 0.5)
    assert len(speculation["acceptance_histogram"]) == 4


def test_the_histogram_of_accepted_depths_sums_to_the_counts():
    metrics = SpeculationMetrics()
    for accepted in (0, 2, 2, 5):
        metrics.record(7, accepted)
    told = metrics.as_dict(7)
    assert told["acceptance_histogram"] == [1, 0, 2, 0, 0, 1, 0, 0]
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] == 4
    assert told["num_accepted_draft_tokens"] == 9
    # Never shorter than what was accepted.
    assert metrics.as_dict(0)["num_spec_tokens"] == 5
