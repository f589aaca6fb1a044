"""Adapters of a router's `user_config` that cannot be served."""

import asyncio

import pytest

from tests.deployments.fleet.test_serve_engines import FakeHandle
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.live_settings.live_options import LiveOptions
from wingbeat.deployments.lora.live import NamedAdapters
from wingbeat.deployments.model_front import ModelFront


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "lora_update_dir is not set"),
        ({"autoscaling_config": {"min_replicas": 0, "max_replicas": 1}}, "with min_replicas 0"),
        ({"served_model_name": "sql"}, "the settings define 'sql' already"),
    ],
    ids=["no room", "asleep", "taken"],
)
def test_adapters_that_cannot_be_served_are_refused_before_any_is_loaded(tmp_path, settings, line: str):
    given = settings if line.startswith("lora_update_dir is not set") else settings | {"lora_update_dir": tmp_path}
    front = ModelFront(AppConfig(**given), FakeHandle(), "a router")
    with pytest.raises(ValueError, match=f"^user_config.lora_modules: {line}"):
        asyncio.run(NamedAdapters([front]).apply(LiveOptions(lora_modules={"sql": "folder"})))
