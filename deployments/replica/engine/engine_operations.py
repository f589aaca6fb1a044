"""Operations on an engine that routers may request; the engine's thread runs them between two rounds.

Routers name an operation in `EveryEngine.operate`. The layers between router and engine pass the name on unchecked.
"""

from collections.abc import Callable
from typing import Any

from wingbeat.deployments.parts import merged
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup


def operations_of(setup: EngineSetup) -> dict[str, Callable[..., Any]]:
    """Return all operations by name. Their arguments and results must be picklable, because they cross processes."""
    of_parts = merged("operations", setup.keepers) | merged("engine_operations", setup.engine)
    return {"reset_prefix_cache": setup.engine.reset_prefix_cache} | of_parts
