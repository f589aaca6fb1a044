"""Options of Serve for replacing replicas; starts nothing."""

import pytest

from wingbeat.deployments.app import _router, _verifier
from wingbeat.deployments.app_config import AppConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_an_update_starts_a_new_router_first_and_needs_no_second_gpu():
    config = AppConfig()
    routers, verifiers = _router(config, at_head=False)._deployment_config, _verifier(config)._deployment_config
    assert (routers.max_surge_percent, verifiers.max_surge_percent) == (100, 0)
