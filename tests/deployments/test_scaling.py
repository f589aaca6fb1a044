"""Options of Serve for adding and removing replicas; starts nothing."""

import pytest

from wingbeat.deployments.app import _verifier
from wingbeat.deployments.app_config import AppConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_fixed_number_of_replicas_does_not_scale():
    assert _verifier(AppConfig(num_replicas=2))._deployment_config.autoscaling_config is None


def test_an_autoscaling_config_is_passed_on():
    found = _verifier(AppConfig(autoscaling_config={"max_replicas": 3, "downscale_delay_s": 7.0}))
    config = found._deployment_config.autoscaling_config
    assert (config.max_replicas, config.downscale_delay_s) == (3, 7.0)
