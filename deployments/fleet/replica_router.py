"""Request router for Serve that sends calls to a particular engine. The router runs in the process of each caller.

Serve pickles this module by value into every caller. Therefore this module holds no state itself, and imports the
directory as a module, which is not pickled.
"""

from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from wingbeat.deployments.fleet import directory as engine_directory

MAX_LEAVING = 64
"""Maximum number of removed replicas that calls can still find by id."""


class EngineRequestRouter(RequestRouter):
    """Sends a call to the engine that its argument `engine_id` names; calls without this argument go to any engine.

    A call for a lost engine is sent to any other engine, which refuses the call. Otherwise the call would wait forever
    for a replica with the named id. Calls for an engine that is being stopped still reach that engine, because its
    requests may still run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._named: dict[str, RunningReplica] = {}
        """Replicas, by engine id, that Serve runs."""
        self._leaving: dict[str, RunningReplica] = {}
        """Replicas, by engine id, that Serve has removed most recently, except replicas that are known to be dead."""

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Chooses a replica. Unless the call is a retry, the named replica is chosen at once, even if Serve has removed
        it and so does not offer it.

        Serve itself would first ask the replica for the length of its queue, again and again until an answer comes
        within a second. On an overloaded machine a call would then wait until its time limit, although it has no other
        replica to go to.
        """
        engine_id = None if is_retry else pending_request.kwargs.get("engine_id")
        named = self._named.get(engine_id) or self._leaving.get(engine_id)
        return named or await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's hook: returns lists of replicas in the order in which Serve shall try them."""
        engine_id = None if pending_request is None else pending_request.kwargs.get("engine_id")
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == engine_id]
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook, called with the replicas that run now."""
        live = {replica.replica_id for replica in replicas}
        gone = {i.unique_id: replica for i, replica in self.curr_replicas.items() if i not in live}
        self._leaving = dict([*self._leaving.items(), *gone.items()][-MAX_LEAVING:])
        self._named = {replica.replica_id.unique_id: replica for replica in replicas}
        super().update_replicas(replicas)
        engine_directory.DIRECTORY.publish(self._deployment_id, frozenset(r.replica_id.unique_id for r in replicas))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve's hook, called when a call finds a replica dead before the controller does."""
        super().on_replica_actor_died(replica_id)
        for known in (self._named, self._leaving):
            known.pop(replica_id.unique_id, None)
        engine_directory.DIRECTORY.remove(self._deployment_id, replica_id.unique_id)
