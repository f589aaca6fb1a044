"""`/v1/weights`: weights that each replica serves, and their replacement by operators."""

from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field

from wingbeat.deployments.api.answers.answering import read_body
from wingbeat.deployments.api.bodies.request_body import RequestBody
from wingbeat.deployments.api.bodies.unserved_fields import none_ignored
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.errors import ApiError, invalid
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.fleet.fingerprint import fingerprint
from wingbeat.deployments.weights.push import FleetWeights, WeightsConflict, WeightsRefused

WEIGHTS_PATH = "/v1/weights"
UPDATE_PATH = WEIGHTS_PATH + "/update"
DRAIN_S = 60.0


class UpdateWeightsBody(RequestBody):
    """`POST /v1/weights/update`: serve other weights."""

    folder: str = Field(min_length=1, max_length=4096)
    """Folder of a checkpoint of the same model, on the machine of each replica."""
    model: str | None = None
    """Model whose weights are replaced; required if several models are served."""
    drain_s: float = Field(DRAIN_S, ge=0, le=600)
    """Maximum seconds that running requests of a replica have to finish."""


BODIES = {UPDATE_PATH: UpdateWeightsBody}
"""Body class of the update endpoint, by path. The endpoint is for operators."""


def add_weights_routes(app: FastAPI, models: ServedModels) -> None:
    """Add `/v1/weights` and `/v1/weights/update`."""
    fleets = {service: FleetWeights.of(service.pool) for service in models}

    @app.get(WEIGHTS_PATH)
    async def weights() -> dict[str, Any]:
        return {"object": "list", "data": [await _card(service, fleet) for service, fleet in fleets.items()]}

    @app.post(UPDATE_PATH)
    async def update(request: Request) -> dict[str, Any]:
        with none_ignored():
            body = await read_body(UpdateWeightsBody, request)
        service = models.choose(body.model)
        try:
            await fleets[service].push(body.folder, body.drain_s)
        except WeightsRefused as error:
            raise invalid("folder", f"cannot be served: {error}") from None
        except WeightsConflict as error:
            raise ApiError(f"The weights are not replaced: {error}.", status=409, code="weights_not_replaced") from None
        return await _card(service, fleets[service])


async def _card(service: CompletionService, fleet: FleetWeights) -> dict[str, Any]:
    """Return a description of one model's weights; `weights` and `folder` are null if replicas serve different weights,
    or if there are no replicas.
    """
    identity, engines = service.pool.info.text_identity, await fleet.described()
    for card in engines.values():
        if card is not None:
            card["system_fingerprint"] = fingerprint(identity, card["weights"] or "")
    served = {(card["weights"], card["folder"]) if card else None for card in engines.values()}
    weights, folder = (served.pop() if len(served) == 1 else None) or (None, None)
    model = service.pool.info.model_name
    return {"object": "weights", "model": model, "weights": weights, "folder": folder, "engines": engines}
