"""What Serve is told about adding and removing replicas; starts nothing."""

import pytest

from wingbeat.cluster.autoscaling import DELAYS
from wingbeat.deployments.app import _verifier
from wingbeat.deployments.app_config import AppConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def scaling(**settings):
    return _verifier(AppConfig(**settings))._deployment_config.autoscaling_config


def test_replicas_scale_by_tokens_within_the_target_fast_up_and_slowly_down():
    found = scaling(autoscaling_config={"min_replicas": 1, "max_replicas": 3}, target_queue_s=4.0)
    assert found.policy.policy_function == "wingbeat.cluster.autoscaling.TokenLoadPolicy"
    assert found.policy.policy_kwargs == {"target_queue_s": 4.0}
    assert (found.upscale_delay_s, found.downscale_delay_s) == (DELAYS["upscale_delay_s"], DELAYS["downscale_delay_s"])
    assert found.upscale_delay_s < found.downscale_delay_s


def test_delays_and_a_policy_of_ones_own_are_kept():
    own = {"policy_function": "tests.fakes:wait_until"}
    found = scaling(autoscaling_config={"max_replicas": 3, "policy": own, "downscale_delay_s": 7.0})
    assert (found.policy.policy_function, found.downscale_delay_s) == (own["policy_function"], 7.0)


def test_a_fixed_number_of_replicas_does_not_scale():
    assert scaling(num_replicas=2) is None
