"""The engines of one replica, and the start of the first engine."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor, Life


class ReplicaEngines:
    """Engines of one replica, loaded from the weights that the settings name.

    Args:
        config: the settings.
        new_life: function that creates an engine's `EngineLife` from settings and the digest of the weights. An empty
            digest stands for the weights that the settings name.
    """

    def __init__(self, config: AppConfig, new_life: Callable[[AppConfig, str], Life]) -> None:
        self._config, self._new_life = config, new_life
        self.engines = EngineSupervisor(self._launch)

    async def start(self) -> None:
        """Start the first engine.

        Raises:
            Exception: the error that prevented the start; the message is one line that names what to change.
        """
        await self.engines.start()

    def _launch(self) -> Life:
        return self._new_life(self._config, "")

    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        """Return the operations that routers may request by `Verifier.ask`, by name."""
        return {}
