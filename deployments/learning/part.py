"""A draft head that is trained on what is served; imported by commands too, so that it imports what it adds later."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.learning.settings import asked, check_settings, learns, refusals, settings

if TYPE_CHECKING:
    import typer
    from fastapi import FastAPI
    from pydantic import BaseModel

    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.learning.replica_learning import ReplicaLearning
    from wingbeat.deployments.model_front import ModelFront
    from wingbeat.deployments.recordings.live_recording import TrafficRecording
    from wingbeat.deployments.replica.engine.engine_calls import EngineFigures
    from wingbeat.runtime.drafters.worker import DraftWorker

__all__ = ["asked", "check_settings", "refusals", "settings"]

families = "wingbeat.deployments.learning.families:learning_families"


def add_commands(app: "typer.Typer") -> None:
    """Add `wingbeat drafter`."""
    from wingbeat.deployments.cli.commands import new_app
    from wingbeat.deployments.learning.drafter_command import add_drafter_commands

    drafter = new_app("Versions of the draft head of a server that learns.")
    add_drafter_commands(drafter)
    app.add_typer(drafter, name="drafter")


def add_router_routes(app: "FastAPI", fronts: "Sequence[ModelFront]") -> None:
    """Add `/v1/drafter`, where the head of a model learns."""
    from wingbeat.deployments.learning.folder import ledger_of
    from wingbeat.deployments.learning.routes import HeadVersions, add_drafter_routes

    front = next((one for one in fronts if one.config.learn is not None), None)
    if front is not None:
        add_drafter_routes(app, HeadVersions(ledger_of(front.config), front.figures))


def operator_paths() -> tuple[str, ...]:
    """Paths by which another version is served."""
    from wingbeat.deployments.learning.routes import PROMOTE_PATH, REPAIR_PATH, ROLLBACK_PATH

    return PROMOTE_PATH, ROLLBACK_PATH, REPAIR_PATH


def bodies() -> "dict[str, type[BaseModel]]":
    """Bodies of the requests by which another version is served."""
    from wingbeat.deployments.learning import routes

    return {
        routes.PROMOTE_PATH: routes.PromoteBody,
        routes.ROLLBACK_PATH: routes.RollbackBody,
        routes.REPAIR_PATH: routes.RepairBody,
    }


def beside_engine(config: "AppConfig", figures: "Callable[[], Awaitable[EngineFigures]]") -> "ReplicaLearning | None":
    """Judge versions of the head, and keep the learner running."""
    if config.learn is None:
        return None
    from wingbeat.deployments.learning.replica_learning import ReplicaLearning

    return ReplicaLearning(config, figures)


def refuses_weights(config: "AppConfig") -> str | None:
    """Why no other weights of the verifier go with a learner."""
    if not learns(config):
        return None
    return "learn is given, which trains the head for the weights of the settings: with trains false they go together"


def observe(config: "AppConfig", engine: Any, engine_id: str) -> "TrafficRecording | None":
    """Store rounds in the learner's ring."""
    if not learns(config):
        return None
    from wingbeat.deployments.learning.rounds import record_rounds

    return record_rounds(config, engine)


def keeps_weak_head(config: "AppConfig") -> bool | None:
    """A head that is trained may be weak at first, where no round is drafted by it that is not worth it."""
    return True if learns(config) and config.adaptive is not False else None


def follow_head(config: "AppConfig", worker: "DraftWorker") -> None:
    """Keep a drafter at the version of its head that is served."""
    if config.learn is None:
        return
    from wingbeat.deployments.learning.folder import ledger_of
    from wingbeat.runtime.learning.head_follower import HeadFollower

    HeadFollower(ledger_of(config), worker).start()
