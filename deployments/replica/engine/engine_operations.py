"""Operations that routers may ask of an engine, which its thread runs between two rounds.

A router names one by `EveryEngine.operate`; nothing between the two knows which there are.
"""

from collections.abc import Callable
from typing import Any

from wingbeat.deployments.parts import merged
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup


def operations_of(setup: EngineSetup) -> dict[str, Callable[..., Any]]:
    """All operations by name; arguments and answers are pickled on their way."""
    of_parts = merged("operations", setup.keepers) | merged("engine_operations", setup.engine)
    return {"reset_prefix_cache": setup.engine.reset_prefix_cache} | of_parts
