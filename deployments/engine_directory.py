"""Which engines are live, and how a call reaches a particular one.

Serve tells every caller of a deployment which replicas run, through the deployment's request router, which lives in the
caller's process. Ours writes them into a directory that the engine pool reads, and honours the engine a call names.
"""

import threading
from collections import defaultdict
from collections.abc import Callable

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

Listener = Callable[[frozenset[str]], None]


class EngineDirectory:
    """Live engines per deployment, with listeners; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[DeploymentID, frozenset[str]] = {}
        self._listeners: defaultdict[DeploymentID, list[Listener]] = defaultdict(list)

    def publish(self, deployment: DeploymentID, engine_ids: frozenset[str]) -> None:
        """Replace the live engines of a deployment and tell its listeners where that changed something."""
        with self._lock:
            if self._engines.get(deployment) == engine_ids:
                return
            self._engines[deployment] = engine_ids
            listeners = list(self._listeners[deployment])
        for listener in listeners:
            listener(engine_ids)

    def remove(self, deployment: DeploymentID, engine_id: str) -> None:
        """Take out one engine that is known to be dead."""
        self.publish(deployment, self.engines(deployment) - {engine_id})

    def engines(self, deployment: DeploymentID) -> frozenset[str]:
        """Ids of the live engines."""
        with self._lock:
            return self._engines.get(deployment, frozenset())

    def subscribe(self, deployment: DeploymentID, listener: Listener) -> Callable[[], None]:
        """Call `listener` with the live engines now and at every change, from whichever thread learns of it.

        Returns the function that ends the subscription.
        """
        with self._lock:
            self._listeners[deployment].append(listener)
            engine_ids = self._engines.get(deployment, frozenset())
        listener(engine_ids)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners[deployment].remove(listener)

        return unsubscribe


DIRECTORY = EngineDirectory()
"""One per process: Serve constructs the request router, so the two can only meet in a global."""


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
        DIRECTORY.publish(self._deployment_id, frozenset(r.replica_id.unique_id for r in replicas))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve's hook: a call found the replica dead before the controller did."""
        super().on_replica_actor_died(replica_id)
        DIRECTORY.remove(self._deployment_id, replica_id.unique_id)
