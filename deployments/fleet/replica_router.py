"""How a call reaches a particular engine: Serve's request router, which runs in the process of each caller.

Serve pickles this module by value into every caller, so it holds no state and reaches the directory by module.
"""

from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from wingbeat.deployments.fleet import directory as engine_directory


class EngineRequestRouter(RequestRouter):
    """Sends a call to the engine named by its `engine_id` argument; calls that name none go to any.

    A call for an engine that is gone goes to another one, which refuses it: left waiting, it would wait for ever.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's hook: ranks of replicas, best first."""
        engine_id = None if pending_request is None else pending_request.kwargs.get("engine_id")
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == engine_id]
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook: the replicas that run now."""
        super().update_replicas(replicas)
        engine_directory.DIRECTORY.publish(self._deployment_id, frozenset(r.replica_id.unique_id for r in replicas))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve's hook: a call found the replica dead before the controller did."""
        super().on_replica_actor_died(replica_id)
        engine_directory.DIRECTORY.remove(self._deployment_id, replica_id.unique_id)
