"""Rollout verbs for other Serve deployments and programs that call the router by a handle."""

from collections.abc import Callable
from typing import Any

from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.rollouts.direct_transport import in_object_store
from wingbeat.deployments.rollouts.fleet_rollouts import FleetRollouts, Refused
from wingbeat.deployments.rollouts.routes import as_api_errors
from wingbeat.deployments.rollouts.verbs import VERBS


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
