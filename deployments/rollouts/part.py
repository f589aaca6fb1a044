"""Hooks of rollouts. The implementation is imported only when needed, because commands import this file."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.rollouts.settings import changes_weights

if TYPE_CHECKING:
    from fastapi import FastAPI

    from wingbeat.deployments.api.served_models import ServedModels
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.rollouts.replica_rollouts import ReplicaRollouts
    from wingbeat.deployments.rollouts.rollout_engine import RolloutEngine
    from wingbeat.runtime.drafters.worker import DraftWorker
    from wingbeat.runtime.engine.engine import Engine
    from wingbeat.runtime.rollouts.head_update import HeadUpdate

asked = "wingbeat.deployments.rollouts.settings:asked"
check_settings = "wingbeat.deployments.rollouts.settings:check_settings"
engine_limits = "wingbeat.deployments.rollouts.settings:engine_limits"
refusals = "wingbeat.deployments.rollouts.settings:REFUSED"
settings = "wingbeat.deployments.rollouts.settings:SETTINGS"
operator_paths = "wingbeat.deployments.rollouts.routes:OPERATOR_PATHS"
optional_bodies = "wingbeat.deployments.rollouts.routes:OPERATOR_PATHS"
router_base = "wingbeat.deployments.rollouts.handle_calls:RolloutCalls"


def surface(config: "AppConfig") -> dict[str, Any]:
    """Return the value that the rollout paths need, namely whether operators may change the weights."""
    return {"rollouts": bool(changes_weights(config))}


def add_routes(app: "FastAPI", models: "ServedModels") -> None:
    """Add the rollout paths if the weights of at least one model may be changed."""
    if any(service.of_parts.get("rollouts") for service in models):
        from wingbeat.deployments.rollouts.routes import add_rollout_routes

        add_rollout_routes(app, models)


def serve_engine(config: "AppConfig", engine: "Engine") -> "RolloutEngine | None":
    """Return a wrapper of the engine that lets operators pause the engine and update its weights; None without
    rollouts.

    Raises:
        ValueError: the engine's weights cannot be replaced.
    """
    if not changes_weights(config):
        return None
    from wingbeat.deployments.rollouts.rollout_engine import RolloutEngine

    transfer = config.weight_transfer_config
    backend = transfer.backend if transfer is not None and transfer.backend in ("gloo", "nccl") else None
    return RolloutEngine(engine, config.rollouts_journal, backend, partial(head_update, config), config.model_dir())


def head_update(config: "AppConfig") -> "HeadUpdate":
    """Return a new update of the draft head.

    Raises:
        WeightsRefused: there is no draft head, or no folder for new heads.
    """
    from wingbeat.runtime.drafters.choice import CHECKPOINT
    from wingbeat.runtime.heads.files import find_folder
    from wingbeat.runtime.rollouts.head_update import HeadUpdate
    from wingbeat.runtime.rollouts.served_weights import WeightsRefused

    choice = config.choice()
    if choice.kind != CHECKPOINT:
        raise WeightsRefused(f"drafter is {choice.label}: it has no head to update")
    if config.rollouts_dir is None:
        raise WeightsRefused("rollouts_dir is not given: there is no folder for a draft head")
    return HeadUpdate(find_folder(choice.source), config.rollouts_dir)


def follow_head(config: "AppConfig", worker: "DraftWorker") -> None:
    """Make a drafter load each draft head that operators send."""
    if config.rollouts_dir is not None:
        from wingbeat.runtime.rollouts.head_update import follow

        follow(config.rollouts_dir, worker)


def engine_operations(engine: Any) -> dict[str, Callable[..., Any]]:
    """Return the operations of a rollout engine, by name."""
    return engine.operations() if hasattr(engine, "init_transfer") else {}


def replica_engines(config: "AppConfig", store_key: str | None, new_life: Any) -> "ReplicaRollouts | None":
    """Return the `ReplicaRollouts` of a replica whose weights operators may change; None without rollouts."""
    if not changes_weights(config):
        return None
    from wingbeat.deployments.refused_models.cluster_memory import ClusterMemory
    from wingbeat.deployments.rollouts.replica_rollouts import ReplicaRollouts

    return ReplicaRollouts(config, ClusterMemory(store_key), new_life)
