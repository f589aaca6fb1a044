"""Operations on an engine that routers may request; the engine's thread runs them between two rounds.

Routers name an operation in `EveryEngine.operate`; the layers between pass the name on unchecked.
"""

from collections.abc import Callable
from typing import Any

from wingbeat.deployments.parts import merged
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup


def operations_of(setup: EngineSetup) -> dict[str, Callable[..., Any]]:
    """All operations by name; arguments and results are pickled for transport."""
    of_parts = merged("operations", setup.keepers) | merged("engine_operations", setup.engine)
    return {"reset_prefix_cache": setup.engine.reset_prefix_cache} | of_parts
