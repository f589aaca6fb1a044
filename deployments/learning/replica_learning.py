"""A replica's part in learning: each replica judges the served version, and one of the replicas runs the learner."""

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.learning.folder import ledger_of, said_at_start
from wingbeat.deployments.learning.judge import HeadJudge
from wingbeat.deployments.learning.learner_host import LearnerHost
from wingbeat.deployments.learning.settings import learns
from wingbeat.deployments.replica.engine.engine_calls import EngineFigures

logger = logging.getLogger(__name__)


class ReplicaLearning:
    """Learning of one replica whose settings have `learn`.

    Args:
        figures: returns the engine's figures; raises EngineFailed if there is no engine.
    """

    def __init__(self, config: AppConfig, figures: Callable[[], Awaitable[EngineFigures]]) -> None:
        logger.warning("%s", said_at_start(config))
        self._judge = HeadJudge(ledger_of(config), figures)
        self._host = LearnerHost(config) if learns(config) else None

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines to run as long as the replica runs."""
        return [self._judge.run()] + ([] if self._host is None else [self._host.run()])

    def figures(self) -> dict[str, Any]:
        """Return the figures for `Verifier.stats`."""
        return {"heads": self._judge.said, "learner_pid": 0 if self._host is None else self._host.pid}
