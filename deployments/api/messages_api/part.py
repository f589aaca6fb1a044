"""`/v1/messages` among the endpoints; imported by commands too, so that it imports what it adds where it adds it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from wingbeat.deployments.api.bodies.request_body import RequestBody
    from wingbeat.deployments.api.errors import ApiError
    from wingbeat.deployments.api.served_models import ServedModels


def add_routes(app: "FastAPI", models: "ServedModels") -> None:
    """Add both endpoints."""
    from wingbeat.deployments.api.messages_api.routes import add_messages_routes

    add_messages_routes(app, models)


def bodies() -> "Mapping[str, type[RequestBody]]":
    """The endpoints' bodies, by their paths."""
    from wingbeat.deployments.api.messages_api.body import CountBody, MessagesBody

    return {"/v1/messages": MessagesBody, "/v1/messages/count_tokens": CountBody}


def error_body(path: str, error: "ApiError") -> dict[str, Any] | None:
    """The JSON body of an error below the endpoints in Anthropic's form; None elsewhere."""
    from wingbeat.deployments.api.messages_api.error_form import MESSAGES_PATH, error_form

    return error_form(error) if path.startswith(MESSAGES_PATH) else None
