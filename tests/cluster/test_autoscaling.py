"""The autoscaling policy as a function of what replicas report, without Ray."""

from types import SimpleNamespace

import pytest

from wingbeat.cluster.autoscaling import LOAD_METRIC, request_load_policy


def context(reported, target=8.0, replicas=1):
    metrics = None if reported is None else {LOAD_METRIC: dict(enumerate(reported))}
    config = SimpleNamespace(get_target_ongoing_requests=lambda: target)
    return SimpleNamespace(aggregated_metrics=metrics, config=config, target_num_replicas=replicas)


@pytest.mark.parametrize(
    ("reported", "desired"), [([0.0], 0.0), ([8.0], 1.0), ([12.0], 1.5), ([20.0, 4.0], 3.0), ([1.0, 1.0, 0.0], 0.25)]
)
def test_replicas_follow_the_sum_of_the_reported_requests(reported, desired):
    assert request_load_policy(context(reported)) == (desired, {})


@pytest.mark.parametrize("reported", [None, []])
def test_silence_changes_nothing(reported):
    assert request_load_policy(context(reported, replicas=3)) == (3, {})


def test_more_load_never_asks_for_fewer_replicas():
    desired = [request_load_policy(context([float(load)]))[0] for load in range(0, 100, 7)]
    assert desired == sorted(desired)
