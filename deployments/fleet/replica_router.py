"""How a call reaches a particular engine: Serve's request router, which runs in the process of each caller.

Serve pickles this module by value into every caller, so it holds no state and reaches the directory by module.
"""

from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from wingbeat.deployments.fleet import directory as engine_directory

MAX_LEAVING = 64


class EngineRequestRouter(RequestRouter):
    """Sends a call to the engine named by its `engine_id` argument; calls that name none go to any.

    A call for an engine that is gone goes to another one, which refuses it: left waiting, it would wait for ever. One
    that is being stopped still answers for the requests that it has.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leaving: dict[str, RunningReplica] = {}
        """By engine, the latest replicas that Serve has taken out and nobody has found dead."""

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Serve's own choice knows no replica that it has taken out; one that refuses a call is not asked again."""
        leaving = None if is_retry else self._leaving.get(pending_request.kwargs.get("engine_id"))
        return leaving or await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's hook: ranks of replicas, best first."""
        engine_id = None if pending_request is None else pending_request.kwargs.get("engine_id")
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == engine_id]
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook: the replicas that run now."""
        live = {replica.replica_id for replica in replicas}
        gone = {i.unique_id: replica for i, replica in self.curr_replicas.items() if i not in live}
        self._leaving = dict([*self._leaving.items(), *gone.items()][-MAX_LEAVING:])
        super().update_replicas(replicas)
        engine_directory.DIRECTORY.publish(self._deployment_id, frozenset(r.replica_id.unique_id for r in replicas))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve's hook: a call found the replica dead before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._leaving.pop(replica_id.unique_id, None)
        engine_directory.DIRECTORY.remove(self._deployment_id, replica_id.unique_id)
