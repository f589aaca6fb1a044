"""Replicas of a file of Ray Serve LLM come and go under load."""

import pytest

from tests.e2e.test_scaling_live import LIMITS, QUICK, Clients, expected, num_running, play  # noqa: F401 - a fixture
from wingbeat.deployments import ray_llm
from wingbeat.runtime.demo import demo_pair

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


def test_num_replicas_auto_of_a_file_of_ray_serve_llm(start_app, until, expected):  # noqa: F811
    pair = demo_pair()
    config, _, _ = ray_llm.settings_of(
        {
            "llm_configs": [
                {
                    "model_loading_config": {"model_id": "wingbeat-demo", "model_source": str(pair.verifier)},
                    "accelerator_config": {"kind": "cpu"},
                    "deployment_config": {"num_replicas": "auto", "autoscaling_config": QUICK},
                    "engine_kwargs": {
                        **LIMITS,
                        "speculative_config": {"method": "eagle3", "model": str(pair.drafter)},
                    },
                }
            ]
        }
    )
    settings = {name: getattr(config, name) for name in config.model_fields_set}
    with start_app("auto", **settings) as app:
        assert num_running(app) == (1, 0)
        play(app, Clients(app, expected), until, ((12, 3), (1, 1)))
