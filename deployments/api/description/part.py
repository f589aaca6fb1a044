"""The description among the endpoints; imported by commands too, so that it imports what it adds later."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI


def add_last(app: "FastAPI") -> None:
    """Add both endpoints."""
    from wingbeat.deployments.api.description.routes import add_description
    from wingbeat.deployments.api.endpoints.server_routes import version_of_package

    add_description(app, version_of_package())
