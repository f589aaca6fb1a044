"""Supervisor of a drafter on another node, whose network connection may break."""

import asyncio
import logging

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.drafters.supervisor import DrafterSupervisor, root_cause
from wingbeat.deployments.replica.engine.engine_messages import EngineStarted
from wingbeat.deployments.replica.engine_client import EngineFailed

logger = logging.getLogger(__name__)
RECONNECT_S, RECONNECT_AFTER_S = 5.0, 1.0
"""Two limits for a drafter on another node whose connection broke. RECONNECT_S: seconds within which the drafter must
attach again. RECONNECT_AFTER_S: seconds that the broken connection must have lasted; if it was shorter, the drafter is
replaced.
"""


class ReconnectingSupervisor(DrafterSupervisor):
    """Supervisor that attaches a drafter again if it has lost only its network connection."""

    async def _reconnected(self) -> bool:
        if self._drafter is None or self._attached_at is None or self._clock() - self._attached_at < RECONNECT_AFTER_S:
            return False
        try:
            await asyncio.wait_for(self._attach(), RECONNECT_S)
        except EngineFailed:
            raise
        except Exception as error:
            logger.info("The drafter is not reached again: %s", root_cause(error))
            return False
        return True


def drafter_supervisor(config: AppConfig, started: EngineStarted) -> type[ReconnectingSupervisor] | None:
    """Return the class of the supervisor of a drafter that connects over the network; None for others."""
    return None if isinstance(started.channel_name, str) else ReconnectingSupervisor
