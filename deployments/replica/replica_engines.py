"""The engines of one replica, and how the first of them is started."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.cluster_memory import ClusterMemory
from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor, Life
from wingbeat.runtime.verifier_errors import UnsupportedModelError

REFUSALS = b"wingbeat refusals"


class ReplicaEngines:
    """Engines of one replica: each is loaded from what the settings name.

    Args:
        config: the settings.
        memory: of the build that the replica is of.
        new_life: launches an engine for settings and the digest of its weights, which is empty for what they name.
    """

    def __init__(self, config: AppConfig, memory: ClusterMemory, new_life: Callable[[AppConfig, str], Life]) -> None:
        self._config, self._memory, self._new_life = config, memory, new_life
        self.engines = EngineSupervisor(self._launch)

    async def start(self) -> None:
        """Start the first engine.

        Raises:
            Exception: what kept it from starting; one line that says what to change.
        """
        await self._start_engine("")

    async def _start_engine(self, digest: str) -> None:
        """Start an engine, unless a replica before this one found that the model cannot be served: Serve starts another
        replica where one fails, and the same model would be loaded to be refused again."""
        name = f"/{digest}"
        refusal = await self._memory.read(REFUSALS, name)
        if refusal is not None:
            raise UnsupportedModelError(refusal)
        try:
            await self.engines.start()
        except UnsupportedModelError as error:
            await self._memory.write(REFUSALS, str(error), name)
            raise

    def _launch(self) -> Life:
        return self._new_life(self._config, "")

    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        """Operations that routers may ask of it by `Verifier.ask`, by name."""
        return {}
