"""Rollout verbs for other Serve deployments and programs that call the router by a handle.

References may name tensors that stay in the memory of a trainer's actor (Ray Direct Transport). Ray sends such tensors
directly only to actors that the caller has put into a communication group or started for that transport. Serve starts
the engines' replicas itself, so neither is possible, and the tensors are copied through the object store instead.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.rollouts.fleet_rollouts import FleetRollouts, Refused
from wingbeat.deployments.rollouts.routes import as_api_errors
from wingbeat.deployments.rollouts.verbs import VERBS

FETCH_S = 120.0
"""Maximum seconds to wait for the tensors of a trainer's actor."""


async def in_object_store(reference: Any) -> Any:
    """Return a reference to the same object in Ray's object store; any other value is returned unchanged.

    Raises:
        Refused: the actor does not give its tensors.
    """
    transport = getattr(reference, "tensor_transport", lambda: None)()
    if not transport:
        return reference
    import ray
    from ray.exceptions import RayError

    def fetched() -> Any:
        return ray.put(ray.get(reference, timeout=FETCH_S, _use_object_store=True))

    try:
        return await asyncio.to_thread(fetched)
    # Ray raises errors of many kinds, a TypeError if this version of Ray cannot fetch such tensors
    except (RayError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Refused(f"tensors are of Ray's transport {transport}, and cannot be fetched: {reason}") from None


class RolloutCalls:
    """Methods of a router that a Serve handle can call: one method for each verb of `VERBS`, with the verb's name and
    fields.

    Raises:
        ApiError: raised by each method for a request that HTTP would answer with this error. The caller gets an error
            of Serve whose cause is the ApiError.
    """

    _models: ServedModels

    async def update_weights(
        self, tensors: Any = None, update_info: dict[str, Any] | None = None, model: str | None = None
    ) -> dict[str, Any]:
        """Write tensors of the open weight update.

        Args:
            tensors: list of Ray object references to mappings from names to tensors. The tensors of each mapping are
                written together. References of Ray Direct Transport are fetched through the object store.
            update_info: alternative to `tensors`; the same as the field `update_info` of the HTTP body.
        """
        if tensors is None:
            return await self._run("update_weights", model, {"update_info": update_info or {}})
        fleet = self._fleet(model)
        with as_api_errors("update_weights"):
            if not isinstance(tensors, list):
                raise Refused("tensors must be a list of references")
            if not tensors:
                raise Refused("tensors is an empty list: there is nothing to write")
            for one in tensors:
                await fleet.ask("update_weights", tensors=await in_object_store(one))
        return {"message": "Weights updated"}

    async def _run(self, name: str, model: str | None, given: dict[str, Any]) -> dict[str, Any]:
        fleet, verb = self._fleet(model), VERBS[name]
        with as_api_errors(name):
            return await verb.run(fleet, **verb.fields(given))

    def _fleet(self, model: str | None) -> FleetRollouts:
        service = self._models.choose(model)
        with as_api_errors("rollouts"):
            if not service.of_parts.get("rollouts"):
                raise Refused("rollouts is not given: this server changes no weights")
        return FleetRollouts(service.pool)


def _method(name: str) -> Callable[..., Any]:
    async def call(self: RolloutCalls, model: str | None = None, **given: Any) -> dict[str, Any]:
        return await self._run(name, model, given)

    call.__name__, call.__doc__ = name, VERBS[name].run.__doc__
    return call


for _name in VERBS.keys() - {"update_weights"}:
    setattr(RolloutCalls, _name, _method(_name))
