"""Operations that routers may ask of an engine, which its thread runs between two rounds.

A router names one by `EveryEngine.operate`; nothing between the two knows which there are.
"""

from collections.abc import Callable
from typing import Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.parts import hooks
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup
from wingbeat.runtime.scheduling.request import AdapterName


class EngineOperations:
    """Operations by name; arguments and answers are pickled on their way."""

    def __init__(self, setup: EngineSetup, config: AppConfig) -> None:
        self._engine = setup.engine
        self._adapters = setup.adapters
        self._config = config

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes that are cached."""
        self._engine.reset_prefix_cache()

    def load_adapter(self, name: str, path: str) -> tuple[AdapterName | None, str]:
        """Read and check an adapter below `lora_update_dir`: its name, or None and why it is not served."""
        root = self._config.lora_update_dir
        if self._adapters is None or root is None:
            return None, "this engine loads none; lora_update_dir says whether and from where"
        try:
            if not (root / path).resolve().is_relative_to(root.resolve()):
                return None, f"{path} is not below lora_update_dir"
            adapter = self._adapters.inspect(name, root / path)
            self._adapters.resident.warm(adapter)
        except (ValueError, OSError, RuntimeError) as error:  # whatever a path can lead to, such as a circle of links
            return None, str(error)
        return adapter, ""

    def unload_adapter(self, digest: str) -> None:
        """Free an adapter's place once no sequence runs with it."""
        if self._adapters is not None:
            self._adapters.resident.unload(digest)


def operations_of(setup: EngineSetup, config: AppConfig) -> dict[str, Callable[..., Any]]:
    """All that a router may name."""
    own = EngineOperations(setup, config)
    found = {name: getattr(own, name) for name in vars(EngineOperations) if not name.startswith("_")}
    return found | {name: run for of_part in hooks("operations") for name, run in of_part(setup.keepers).items()}
