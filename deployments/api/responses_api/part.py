"""`/v1/responses` among the endpoints; imported by commands too, so that it imports what it adds where it adds it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from wingbeat.deployments.api.bodies.request_body import RequestBody
    from wingbeat.deployments.api.served_models import ServedModels


def add_routes(app: "FastAPI", models: "ServedModels") -> None:
    """Add the endpoint."""
    from wingbeat.deployments.api.responses_api.routes import add_responses_route

    add_responses_route(app, models)


def bodies() -> "Mapping[str, type[RequestBody]]":
    """The endpoint's body, by its path."""
    from wingbeat.deployments.api.responses_api.body import ResponsesBody

    return {"/v1/responses": ResponsesBody}
