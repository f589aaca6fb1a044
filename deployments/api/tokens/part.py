"""`/tokenize` and its like among the endpoints; imported by commands too, so that it imports what it adds later."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from wingbeat.deployments.api.bodies.request_body import RequestBody
    from wingbeat.deployments.api.served_models import ServedModels


def add_routes(app: "FastAPI", models: "ServedModels") -> None:
    """Add the three endpoints."""
    from wingbeat.deployments.api.tokens.routes import add_token_routes

    add_token_routes(app, models)


def bodies() -> "Mapping[str, type[RequestBody]]":
    """Bodies of the two routes that have one, by path."""
    from wingbeat.deployments.api.tokens.routes import DetokenizeBody, TokenizeBody

    return {"/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}
