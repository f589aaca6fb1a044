"""Weights that are pushed; imported by commands too, so that it imports what it adds where it adds it."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer
    from fastapi import FastAPI
    from prometheus_client import Metric

    from wingbeat.deployments.api.bodies.request_body import RequestBody
    from wingbeat.deployments.api.served_models import ServedModels
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.cli.local import OpenEngine
    from wingbeat.deployments.metrics.fleet_figures import FleetSnapshot
    from wingbeat.deployments.replica.cluster_memory import ClusterMemory
    from wingbeat.deployments.replica.engine_supervisor import Life
    from wingbeat.deployments.weights.replica_weights import ReplicaWeights


def add_commands(app: "typer.Typer", open_engine: "OpenEngine") -> None:
    """Add `wingbeat weights`."""
    from wingbeat.deployments.cli.commands import new_app
    from wingbeat.deployments.weights.command import add_weights_commands

    weights = new_app("The verifier's weights on a server that runs.")
    add_weights_commands(weights)
    app.add_typer(weights, name="weights")


def add_routes(app: "FastAPI", models: "ServedModels") -> None:
    """Add `/v1/weights`."""
    from wingbeat.deployments.weights.routes import add_weights_routes

    add_weights_routes(app, models)


def operator_paths() -> tuple[str, ...]:
    """The path by which weights are pushed."""
    from wingbeat.deployments.weights.routes import UPDATE_PATH

    return (UPDATE_PATH,)


def bodies() -> "Mapping[str, type[RequestBody]]":
    """The body of a push."""
    from wingbeat.deployments.weights.routes import UPDATE_PATH, UpdateWeightsBody

    return {UPDATE_PATH: UpdateWeightsBody}


def families(snapshot: "FleetSnapshot") -> "Iterator[Metric]":
    """Which weights each engine has."""
    from wingbeat.deployments.weights.families import weights_families

    return weights_families(snapshot)


def replica_engines(
    config: "AppConfig", memory: "ClusterMemory", new_life: "Callable[[AppConfig, str], Life]"
) -> "ReplicaWeights":
    """Engines whose weights are replaced."""
    from wingbeat.deployments.weights.replica_weights import ReplicaWeights

    return ReplicaWeights(config, memory, new_life)
