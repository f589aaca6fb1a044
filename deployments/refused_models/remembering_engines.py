"""Engines of a replica that remember for later replicas which model was refused."""

from collections.abc import Callable

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.refused_models.cluster_memory import ClusterMemory
from wingbeat.deployments.replica.engine_supervisor import Life
from wingbeat.deployments.replica.replica_engines import ReplicaEngines
from wingbeat.runtime.verifier_errors import UnsupportedModelError

REFUSALS = b"wingbeat refusals"


class RememberingEngines(ReplicaEngines):
    """`ReplicaEngines` that load a refused model only once, however often Serve starts the replica.

    Args:
        memory: store shared by all replicas of the build.
    """

    def __init__(self, config: AppConfig, memory: ClusterMemory, new_life: Callable[[AppConfig, str], Life]) -> None:
        super().__init__(config, new_life)
        self._memory = memory

    async def start(self) -> None:
        """See `ReplicaEngines`."""
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


def remembering_engines(
    config: AppConfig, store_key: str | None, new_life: Callable[[AppConfig, str], Life]
) -> RememberingEngines:
    """Return the engines of a replica; `store_key` is the key of `ClusterMemory`."""
    return RememberingEngines(config, ClusterMemory(store_key), new_life)
