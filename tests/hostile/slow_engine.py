"""The real engine at a pace of its own, so that what is in mid-stream does not depend on the machine's speed."""

import time

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine.build import build_setup
from wingbeat.deployments.replica.engine.engine_setup import AskNeeds, EngineSetup

ROUND_S = 0.05


def build_slow_engine(config: AppConfig, ask_needs: AskNeeds) -> EngineSetup:
    """Engine factory for `AppConfig.engine_factory`: no round takes less than `ROUND_S`."""
    setup = build_setup(config, ask_needs)
    step = setup.engine.step

    def slow_step() -> list:
        time.sleep(ROUND_S)
        return step()

    setup.engine.step = slow_step
    return setup
