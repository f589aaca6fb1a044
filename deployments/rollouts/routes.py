"""vLLM's HTTP paths for rollouts (pause, sleep, weight updates), and Ray Serve LLM's aliases."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from wingbeat.deployments.api.bodies.request_body import read_object
from wingbeat.deployments.api.errors import ApiError, invalid
from wingbeat.deployments.api.served_models import ServedModels
from wingbeat.deployments.rollouts.fleet_rollouts import Conflict, FleetRollouts, Refused
from wingbeat.deployments.rollouts.verbs import VERBS, Verb

OPERATOR_PATHS = frozenset(f"/{name}" for name in VERBS)
"""All rollout paths. The paths are for operators and accept an empty body."""


def add_rollout_routes(app: FastAPI, models: ServedModels) -> None:
    """Add a path for each verb."""
    fleets = {service: FleetRollouts(service.pool) for service in models}

    def add(name: str, verb: Verb) -> None:
        @app.api_route(f"/{name}", methods=["GET" if verb.reads else "POST"], name=name)
        async def answer(request: Request) -> JSONResponse:
            model, given = await _given(request)
            service = models.choose(model)
            with as_api_errors(name):
                fields = verb.fields(given)
                said = await verb.run(fleets[service], **fields)
            lost = fleets[service].lost
            return JSONResponse(said | ({"engines_lost": lost} if lost else {}))

    for name, verb in VERBS.items():
        add(name, verb)


@contextmanager
def as_api_errors(name: str) -> Iterator[None]:
    """Context manager that turns engines' refusals into HTTP errors."""
    try:
        yield
    except Refused as error:
        param, _, problem = str(error).partition(" ")
        raise invalid(param.removesuffix(":"), problem) from None
    except Conflict as error:
        raise ApiError(f"{name} cannot be done now: {error}.", status=409, code="wrong_order") from None


async def _given(request: Request) -> tuple[str | None, dict[str, Any]]:
    """Return the name of the model and the arguments, read from the query, the body's fields and the body's field
    `options`.
    """
    query = request.query_params
    given: dict[str, Any] = {}
    for name in query:
        values = query.getlist(name)
        given[name] = values if len(values) > 1 else values[0]
    if request.method != "POST" or not (body := await request.body()):
        return given.pop("model", None), given
    fields = read_object(body)
    options = fields.pop("options", None) or {}
    if not isinstance(options, Mapping):
        raise invalid("options", "must be an object")
    given |= {**fields, **options}
    model = given.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise invalid("model", "must be text")
    return model, given
