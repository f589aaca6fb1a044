"""Serve's request router of the engines, without Serve: calls reach the engine they name, also while it is stopped."""

import asyncio

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from wingbeat.deployments.fleet.directory import DIRECTORY
from wingbeat.deployments.fleet.replica_router import EngineRequestRouter

DEPLOYMENT = DeploymentID("Verifier", "test_replica_router")


class FakeReplica:
    """The part of a Ray Serve replica that the router uses."""

    max_ongoing_requests = 100
    node_id, availability_zone, multiplexed_model_ids = "node", None, frozenset()

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def call(engine_id: str | None) -> PendingRequest:
    kwargs = {} if engine_id is None else {"engine_id": engine_id}
    return PendingRequest(args=[], kwargs=kwargs, metadata=RequestMetadata("id", f"call {engine_id}"))


async def chosen(router: EngineRequestRouter, engine_id: str | None, is_retry: bool = False) -> str:
    replica = await router._choose_replica_for_request(call(engine_id), is_retry=is_retry)
    return replica.replica_id.unique_id


def test_calls_reach_the_engine_they_name_until_it_is_dead():
    async def scenario() -> None:
        replicas = {name: FakeReplica(name) for name in "ab"}
        router = EngineRequestRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.update_replicas(list(replicas.values()))
        assert [await chosen(router, name) for name in "ab"] == ["a", "b"]
        router.update_replicas([replicas["b"]])
        assert DIRECTORY.engines(DEPLOYMENT) == {"b"}
        assert [await chosen(router, name) for name in ("a", "b", None)] == ["a", "b", "b"]
        assert await chosen(router, "a", is_retry=True) == "b"
        router.on_replica_actor_died(replicas["a"].replica_id)
        assert await chosen(router, "a") == "b"

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_call_does_not_wait_for_the_queue_of_a_replica_that_is_slow_to_tell_it():
    """Serve's limit for that answer is a second; a call that waited for it would reach its own limit, 30 s."""

    class SlowReplica(FakeReplica):
        async def get_queue_len(self, *, deadline_s: float) -> int:
            await asyncio.sleep(2.0)
            return 0

    async def scenario() -> None:
        router = EngineRequestRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.update_replicas([SlowReplica("a"), FakeReplica("b")])
        assert await asyncio.wait_for(chosen(router, "a"), 1.0) == "a"
        router.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
        assert await chosen(router, "a") == "b"

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_the_last_engine_answers_while_it_is_stopped():
    async def scenario() -> None:
        router = EngineRequestRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.update_replicas([FakeReplica("a")])
        router.update_replicas([])
        assert await chosen(router, "a") == "a"

    asyncio.run(asyncio.wait_for(scenario(), 20))
