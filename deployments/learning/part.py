"""Hooks of a draft head that is trained on served traffic.

The implementation is imported only when needed, because commands import this file.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from wingbeat.deployments.learning.settings import learns

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.learning.replica_learning import ReplicaLearning
    from wingbeat.deployments.recordings.live_recording import TrafficRecording
    from wingbeat.deployments.replica.engine.engine_calls import EngineFigures
    from wingbeat.runtime.drafters.worker import DraftWorker

asked = "wingbeat.deployments.learning.settings:asked"
check_settings = "wingbeat.deployments.learning.settings:check_settings"
refusals = "wingbeat.deployments.learning.settings:REFUSED"
settings = "wingbeat.deployments.learning.settings:SETTINGS"
families = "wingbeat.deployments.learning.families:learning_families"
add_commands = "wingbeat.deployments.learning.drafter_command:add_commands"
add_router_routes = "wingbeat.deployments.learning.routes:add_router_routes"
operator_paths = "wingbeat.deployments.learning.routes:BODIES"
bodies = "wingbeat.deployments.learning.routes:BODIES"


def beside_engine(config: "AppConfig", figures: "Callable[[], Awaitable[EngineFigures]]") -> "ReplicaLearning | None":
    """Return the `ReplicaLearning` (judge of head versions and host of the learner); None unless the setting `learn` is
    given.
    """
    if config.learn is None:
        return None
    from wingbeat.deployments.learning.replica_learning import ReplicaLearning

    return ReplicaLearning(config, figures)


def refuses_weights(config: "AppConfig") -> str | None:
    """Return the reason why other verifier weights cannot be served while there is a learner; None if there is no
    learner.
    """
    if not learns(config):
        return None
    return "learn trains the head for the weights that the settings name: set trains to false in learn to push others"


def observe(config: "AppConfig", engine: Any, engine_id: str) -> "TrafficRecording | None":
    """Return a recording that stores rounds in the ring of files from which the learner reads; None if no head is
    trained.
    """
    if not learns(config):
        return None
    from wingbeat.deployments.learning.rounds import record_rounds

    return record_rounds(config, engine)


def keeps_weak_head(config: "AppConfig") -> bool | None:
    """Return True if a head that fails its self-test may be served, else None. The head may be served if it is being
    trained and adaptive speculation is on, which drafts only where drafts save time.
    """
    return True if learns(config) and config.adaptive is not False else None


def follow_head(config: "AppConfig", worker: "DraftWorker") -> None:
    """Make a drafter load each version of its head as soon as the version is served."""
    if config.learn is None:
        return
    from wingbeat.deployments.learning.folder import ledger_of
    from wingbeat.runtime.learning.head_follower import HeadFollower

    HeadFollower(ledger_of(config), worker).start()
