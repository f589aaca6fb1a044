"""The autoscaling policy as a function of the replicas' reports, without Ray."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from wingbeat.cluster.autoscaling import ReplicaLoad, TokenLoadPolicy, desired_replicas


class Point(NamedTuple):
    """Serve's point of a time series."""

    timestamp: float
    value: float


def busy(num_tokens: float, **others: float) -> ReplicaLoad:
    """A replica whose queue is long and whose slots are all taken."""
    fields = {"num_requests": 64, "num_started": 0, "num_slots": 16, "tokens_per_s": 100, **others}
    return ReplicaLoad(num_tokens=num_tokens, **fields)


def context(*reports: dict[str, list[float]], target: int = 1) -> SimpleNamespace:
    metrics: dict[str, dict[int, list[Point]]] = {}
    for replica, report in enumerate(reports):
        for name, values in report.items():
            metrics.setdefault(name, {})[replica] = [Point(float(at), value) for at, value in enumerate(values)]
    return SimpleNamespace(raw_metrics=metrics or None, target_num_replicas=target)


def report(load: ReplicaLoad) -> dict[str, list[float]]:
    return {name: [value] for name, value in load._asdict().items()}


@pytest.mark.parametrize(
    ("num_tokens", "target_queue_s", "desired"), [(200, 2, 1.0), (500, 2, 2.5), (500, 5, 1.0), (500, 1, 5.0)]
)
def test_all_the_work_there_is_gets_done_within_the_target(num_tokens, target_queue_s, desired):
    assert desired_replicas([busy(num_tokens)], target_queue_s) == desired


def test_the_work_of_the_fleet_counts_however_it_is_spread():
    together = desired_replicas([busy(600), busy(0, num_requests=0)], 2.0)
    assert together == desired_replicas([busy(300, num_requests=32), busy(300, num_requests=32)], 2.0) == 3.0


def test_an_engine_that_was_not_measured_yet_is_taken_to_be_as_fast_as_the_others():
    assert desired_replicas([busy(500), busy(500, tokens_per_s=0)], 2.0) == 5.0


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_no_engine_is_added_while_three_quarters_of_the_slots_are_free(rate):
    loads = [ReplicaLoad(4, 4, 10_000, 0.1, 16, rate), ReplicaLoad(4, 4, 10_000, 0.1, 16, rate)]
    assert desired_replicas(loads, 2.0) == 2.0
    assert desired_replicas([ReplicaLoad(20, 8, 10_000, 0.1, 16, rate)], 2.0) == 5.0


def test_what_runs_keeps_the_slots_and_the_memory_it_has():
    done_soon = [ReplicaLoad(12, 12, 10, 0.1, 16, 1000.0) for _ in range(4)]
    assert desired_replicas(done_soon, 2.0) == 3.0
    long_ones = [ReplicaLoad(2, 2, 10, 0.9, 16, 1000.0) for _ in range(3)]
    assert desired_replicas(long_ones, 2.0) == pytest.approx(2.7)


def test_without_requests_no_replica_is_asked_for():
    assert desired_replicas([ReplicaLoad(num_slots=16, tokens_per_s=100.0)] * 3, 2.0) == 0.0


def test_more_work_never_asks_for_fewer_replicas():
    desired = [desired_replicas([busy(float(tokens))], 2.0) for tokens in range(0, 4000, 130)]
    assert desired == sorted(desired)


def test_the_policy_goes_by_the_latest_that_each_replica_has_reported():
    risen = report(busy(100)) | {"num_tokens": [0.0, 0.0, 400.0]}
    assert TokenLoadPolicy(2.0)(context(risen, report(busy(200)))) == (3.0, {})


def test_silence_changes_nothing():
    assert TokenLoadPolicy()(context(target=3)) == (3, {})
    assert TokenLoadPolicy()(context({"num_requests": [4.0]}, target=3)) == (3, {})
