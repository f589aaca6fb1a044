"""The engines of one replica, and the start of the first engine."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.cluster_memory import ClusterMemory
from wingbeat.deployments.replica.engine_supervisor import EngineSupervisor, Life
from wingbeat.runtime.verifier_errors import UnsupportedModelError

REFUSALS = b"wingbeat refusals"


class ReplicaEngines:
    """Engines of one replica, loaded from the weights that the settings name.

    Args:
        config: the settings.
        memory: store shared by all replicas of the build.
        new_life: function that creates an engine's `EngineLife` from settings and the digest of the weights. An empty
            digest stands for the weights that the settings name.
    """

    def __init__(self, config: AppConfig, memory: ClusterMemory, new_life: Callable[[AppConfig, str], Life]) -> None:
        self._config, self._memory, self._new_life = config, memory, new_life
        self.engines = EngineSupervisor(self._launch)

    async def start(self) -> None:
        """Start the first engine.

        Raises:
            Exception: the error that prevented the start; the message is one line that names what to change.
        """
        await self._start_engine("")

    async def _start_engine(self, digest: str) -> None:
        """Start an engine, unless an earlier replica has found that the model is unsupported.

        After a replica has failed, Serve starts another replica, which without this check would load the same model
        only to refuse it again.
        """
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
        """Return the operations that routers may request by `Verifier.ask`, by name."""
        return {}
