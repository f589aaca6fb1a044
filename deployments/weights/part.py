"""Weights that are pushed; imported by commands too, so that it imports what it adds where it adds it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from wingbeat.deployments.api.bodies.request_body import RequestBody

add_routes = "wingbeat.deployments.weights.routes:add_weights_routes"
families = "wingbeat.deployments.weights.families:weights_families"
replica_engines = "wingbeat.deployments.weights.replica_weights:ReplicaWeights"


def add_commands(app: "typer.Typer") -> None:
    """Add `wingbeat weights`."""
    from wingbeat.deployments.cli.commands import new_app
    from wingbeat.deployments.weights.command import add_weights_commands

    weights = new_app("The verifier's weights on a server that runs.")
    add_weights_commands(weights)
    app.add_typer(weights, name="weights")


def operator_paths() -> tuple[str, ...]:
    """The path by which weights are pushed."""
    from wingbeat.deployments.weights.routes import UPDATE_PATH

    return (UPDATE_PATH,)


def bodies() -> "Mapping[str, type[RequestBody]]":
    """The body of a push."""
    from wingbeat.deployments.weights.routes import UPDATE_PATH, UpdateWeightsBody

    return {UPDATE_PATH: UpdateWeightsBody}
