"""Options of Serve for adding and removing replicas; starts nothing."""

from types import SimpleNamespace

import pytest

from wingbeat.cluster.autoscaling import DELAYS, TARGET_QUEUE_S, ReplicaLoad
from wingbeat.deployments.app import _verifier
from wingbeat.deployments.app_config import AppConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def scaling(**settings):
    return _verifier(AppConfig(**settings))._deployment_config.autoscaling_config


def test_replicas_scale_by_tokens_within_the_target_fast_up_and_slowly_down():
    found = scaling(autoscaling_config={"min_replicas": 1, "max_replicas": 3})
    assert found.policy.policy_function == "wingbeat.cluster.autoscaling.TokenLoadPolicy"
    assert found.policy.policy_kwargs == {"target_queue_s": TARGET_QUEUE_S}
    assert (found.upscale_delay_s, found.downscale_delay_s) == (DELAYS["upscale_delay_s"], DELAYS["downscale_delay_s"])
    assert found.upscale_delay_s < found.downscale_delay_s


def test_the_time_within_which_work_shall_be_done_is_an_argument_of_the_policy():
    found = scaling(autoscaling_config={"max_replicas": 3, "policy": {"policy_kwargs": {"target_queue_s": 4.0}}})
    assert found.policy.policy_function == "wingbeat.cluster.autoscaling.TokenLoadPolicy"
    assert (found.policy.policy_kwargs, found.upscale_delay_s) == ({"target_queue_s": 4.0}, DELAYS["upscale_delay_s"])


def test_the_policy_works_where_serve_has_unpacked_it():
    policy = scaling(autoscaling_config={"max_replicas": 3}).policy
    load = ReplicaLoad(num_requests=64, num_tokens=500, num_slots=16, tokens_per_s=100)
    metrics = {name: {"replica": [SimpleNamespace(value=value)]} for name, value in load._asdict().items()}
    unpacked = policy.get_policy()(**policy.policy_kwargs)
    assert unpacked(SimpleNamespace(raw_metrics=metrics, target_num_replicas=1)) == (2.5, {})


def test_a_replica_is_not_woken_by_what_waited_a_moment_before_the_last_one_went():
    found = scaling(autoscaling_config={"min_replicas": 0, "max_replicas": 3})
    assert (found.aggregation_function, found.look_back_period_s) == ("min", 2.0)
    assert found.look_back_period_s > found.metrics_interval_s


def test_delays_and_a_policy_of_ones_own_are_kept():
    own = {"policy_function": "tests.fakes:wait_until", "policy_kwargs": {"target_queue_s": 4.0}}
    found = scaling(autoscaling_config={"max_replicas": 3, "policy": own, "downscale_delay_s": 7.0})
    assert (found.policy.policy_function, found.downscale_delay_s) == (own["policy_function"], 7.0)
    assert found.policy.policy_kwargs == own["policy_kwargs"]
