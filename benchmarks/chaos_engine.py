"""The application's own engine in a process whose supervisor replaces every lost drafter at once.

A series of failures is answered by pauses of up to 30 s, which would make hours of 200 kills. Each kill here meets the
pair as a first one does: the pause before a first replacement is none. What the pauses are is measured apart.
"""

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica import supervisor as drafter_supervisor
from wingbeat.deployments.replica.build import AskNeeds, EngineSetup, build_setup

PATH = "chaos_engine:build_without_back_off"
PAUSES = ("FIRST_BACK_OFF_S", "LAST_BACK_OFF_S")


def build_without_back_off(config: AppConfig, ask_needs: AskNeeds) -> EngineSetup:
    """`build_setup`; raises AttributeError where the supervisor's pauses have other names."""
    for name in PAUSES:
        getattr(drafter_supervisor, name)
        setattr(drafter_supervisor, name, 0.0)
    return build_setup(config, ask_needs)
